"""What the demo model learns about cooking."""
