"""Policies over the network by openpi's websocket protocol, without pickle; the robot's side never imports torch."""
