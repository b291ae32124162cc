"""The subjects of ``captioning bench``, and what they are compared with. Not part of the installed package."""
