//! Bars and laws.
