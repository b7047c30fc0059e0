"""Images: fetched from a registry or a file, unpacked, kept, and told apart from what is hostile in them."""
