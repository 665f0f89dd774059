//! Typed ids and the three file formats (trace, profile, tables): write, validate, memory-map, view.
