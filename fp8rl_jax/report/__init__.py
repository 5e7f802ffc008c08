"""HTML pages from run directories: `runs` reads, `charts` draws, `page` puts runs side by side, and
`ablation` answers a question over arms and seeds."""
