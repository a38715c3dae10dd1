"""Tower mathematics that recipes share."""
