"""The devices of a cluster by kind, and which kinds stand where in a grid."""
