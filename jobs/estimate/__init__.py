"""What training will take, before it starts: bytes of each GPU and host by part, operations, time, recipes.

`footprint` runs the real network on the meta device, `work` says what a step of each stage runs, `recipes`
combines the options of `wp2 train` and keeps what fits. Source: spec/worldplay2.md g.4, n.3 to n.6.
"""
