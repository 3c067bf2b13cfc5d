"""How many devices a training needs: clusters of growing size, planned one by one, and the answers among them."""
