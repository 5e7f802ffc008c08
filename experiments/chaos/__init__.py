"""What befalls runs: kills at random moments, and long runs whose memory is watched."""
