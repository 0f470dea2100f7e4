"""The web page: plain functions from a photo to pictures, and a thin page of gradio around them."""
