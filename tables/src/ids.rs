//! Typed ids, so that a token cannot be mistaken for an expert, or a group for a rank.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name($inner);

        impl $name {
            /// Creates an id from its number.
            pub const fn new(value: $inner) -> Self {
                Self(value)
            }

            /// Returns the id's number.
            pub const fn get(self) -> $inner {
                self.0
            }

            /// Returns the number as an index into a slice.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A token of the model's vocabulary, 0..V.
    TokenId(u32)
}
id! {
    /// A logical routed expert of one MoE layer, 0..N.
    ExpertId(u16)
}
id! {
    /// An index into the MoE layers, 0..L; not the model's layer number (see [`crate::ModelInfo::layer_ids`]).
    LayerIdx(u16)
}

impl LayerIdx {
    /// Iterates over all layers of a model with `layers` layers.
    pub fn all(layers: usize) -> impl Iterator<Item = LayerIdx> + Clone {
        (0..layers).map(|layer| LayerIdx::new(layer as u16))
    }
}

id! {
    /// A group of experts placed together, which is one EP rank, 0..G.
    GroupId(u16)
}
id! {
    /// An attention-DP rank, to which a request can be pinned.
    RankId(u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_print_and_serialize_as_their_number() {
        assert_eq!(TokenId::new(7).to_string(), "7");
        assert_eq!(serde_json::to_string(&RankId::from(3)).unwrap(), "3");
        assert_eq!(serde_json::from_str::<GroupId>("5").unwrap(), GroupId::new(5));
        assert_eq!(ExpertId::new(9).index(), 9);
        assert!(LayerIdx::new(1) < LayerIdx::new(2));
    }
}
