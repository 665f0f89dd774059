//! The element type of rows on the wire.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::str::FromStr;

use half::bf16;
use semmoe_kernels::Dtype;
use semmoe_kernels::collectives::{CastCollectives, Collectives, HybridCollectives, Lockstep, UnitLink};
use serde::{Deserialize, Serialize};

/// The element type of rows on the wire; sums over ranks are also rounded to it. All ranks of a unit must use the same
/// type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireType {
    /// Unchanged.
    #[default]
    F32,
    /// Rounded: half the bytes.
    Bf16,
}

impl WireType {
    fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
        }
    }
}

/// A command-line argument has an unknown value.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{found:.100}' is not {what}: expected {expected}")]
pub struct UnknownName {
    found: String,
    what: &'static str,
    expected: String,
}

impl UnknownName {
    pub(crate) fn new(found: &str, what: &'static str, expected: impl Into<String>) -> Self {
        Self { found: found.to_owned(), what, expected: expected.into() }
    }
}

impl FromStr for WireType {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let known = [Self::F32, Self::Bf16].into_iter().find(|wire| wire.dtype().name() == text);
        known.ok_or_else(|| UnknownName::new(text, "a wire element type", "f32 or bf16"))
    }
}

impl fmt::Display for WireType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dtype().name())
    }
}

/// One rank's collectives for f32 rows, which are sent unchanged or rounded.
pub struct WireRows {
    unit: Box<dyn Collectives<f32>>,
    /// The element type on the wire.
    pub(super) dtype: Dtype,
}

impl WireRows {
    /// Sends rows unchanged.
    pub fn f32(unit: Box<dyn Collectives<f32>>) -> Self {
        Self { unit, dtype: Dtype::F32 }
    }

    /// Sends rows rounded to bf16.
    pub fn bf16(unit: Box<dyn Collectives<bf16>>) -> Self {
        Self { unit: Box::new(CastCollectives::new(unit)), dtype: Dtype::Bf16 }
    }

    /// Runs reduce-scatter and allgather within `group`, with the same type on the wire.
    pub(super) fn with_groups(self, link: UnitLink<impl Lockstep + 'static>, group: Self) -> Self {
        Self { unit: Box::new(HybridCollectives::grouped(link, self.unit, group.unit)), ..self }
    }
}

impl Deref for WireRows {
    type Target = dyn Collectives<f32>;

    fn deref(&self) -> &Self::Target {
        &*self.unit
    }
}

impl DerefMut for WireRows {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_names_and_others_are_refused() {
        for wire in [WireType::F32, WireType::Bf16] {
            assert_eq!(wire.to_string().parse(), Ok(wire));
        }
        let error = "f16".parse::<WireType>().unwrap_err().to_string();
        assert_eq!(error, "'f16' is not a wire element type: expected f32 or bf16");
    }
}
