"""The number of devices that a training needs: clusters of growing size, planned one by one, and the answers."""
