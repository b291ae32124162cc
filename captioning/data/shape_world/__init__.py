"""The world behind the shapes data set: what a scene may hold, how it is drawn and how it is described.

``scene`` samples, ``drawing`` paints pixels and masks, ``grammar`` writes the captions. All three are functions of a
scene or a random generator; ``captioning.data.shapes`` writes their output to disk and reads it back.
"""
