"""One self-contained HTML page from run directories: `runs` reads, `charts` draws, `page` puts
together."""
