//! Dense linear algebra with bit-identical results on every machine.

pub(crate) mod eigen;
pub(crate) mod matrix;
pub(crate) mod rows;

pub(crate) use eigen::{Eigen, UNIT_ROUNDOFF, top_eigenpairs};
pub(crate) use matrix::{centred, cholesky, mirror, norm, times};
pub(crate) use rows::{add, dot, rows, rows_mut, slice, slice_mut};
