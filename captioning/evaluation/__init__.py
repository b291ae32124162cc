"""How good captions are and where attention looks: strings and arrays in, numbers out."""
