"""What a stage minimises: pure functions of networks and a batch."""
