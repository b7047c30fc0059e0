"""What people look at: the fleet's state, its costs, and the views of it in a terminal and in a browser."""
