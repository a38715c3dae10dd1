"""Tools around bundles: what a machine has, what a bundle is, the demo, archives for reports of bugs."""
