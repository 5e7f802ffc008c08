"""One HTML page from run directories: `runs` reads, `charts` draws, `page` puts all on a page."""
