"""What the demo model learns about work in and around the house."""
