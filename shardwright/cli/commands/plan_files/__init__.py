"""Commands that read plan files: show, compare, price again and export them."""
