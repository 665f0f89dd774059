//! Profile and traces in, tables out; evaluation of tables.
