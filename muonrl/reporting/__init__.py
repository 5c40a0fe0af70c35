"""What a run tells: metrics on disk, live progress, summary, plots and the report page. Import from the submodules."""
