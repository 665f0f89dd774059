//! Builds tables from the solver's results, applying the reader's checks.

use std::path::Path;

use half::f16;

use crate::container::{Layout, LayoutTensor};
use crate::model::list_to_json;
use crate::tables::FORMAT;
use crate::{Attention, FormatError, ModelInfo, Placement, Provenance, RankId, Replicas, Tables, TpParts};

/// The parts of tables, checked by [`finish`](Self::finish) and [`write`](Self::write).
#[derive(Clone, Debug)]
pub struct TablesBuilder {
    model: ModelInfo,
    provenance: Provenance,
    solver: String,
    placement: Placement,
    /// Overrides the placement.
    replicas: Option<Replicas>,
    dp_ranks: u16,
    group_to_dp: Vec<RankId>,
    tokens: TokenParts,
    price: Vec<f32>,
    sequence_price: Option<Vec<f32>>,
}

#[derive(Clone, Debug)]
enum TokenParts {
    Dp(Vec<f16>),
    Tp(TpParts),
}

impl TablesBuilder {
    /// Starts tables for attention dp with one DP rank per group. `t` is [V, `dp_ranks`], `price` has `dp_ranks`
    /// values.
    pub fn dp(model: ModelInfo, provenance: Provenance, placement: Placement, t: Vec<f16>, price: Vec<f32>) -> Self {
        Self::new(model, provenance, placement, TokenParts::Dp(t), price)
    }

    /// Starts tables for attention tp. `price` has G values.
    pub fn tp(model: ModelInfo, provenance: Provenance, placement: Placement, parts: TpParts, price: Vec<f32>) -> Self {
        Self::new(model, provenance, placement, TokenParts::Tp(parts), price)
    }

    fn new(
        model: ModelInfo,
        provenance: Provenance,
        placement: Placement,
        tokens: TokenParts,
        price: Vec<f32>,
    ) -> Self {
        let dp_ranks = placement.groups();
        let group_to_dp = (0..dp_ranks).map(RankId::new).collect();
        let (solver, replicas, sequence_price) = (String::new(), None, None);
        TablesBuilder {
            model,
            provenance,
            solver,
            placement,
            replicas,
            dp_ranks,
            group_to_dp,
            tokens,
            price,
            sequence_price,
        }
    }

    /// Sets the name and settings of the solver.
    #[must_use]
    pub fn solver(mut self, solver: impl Into<String>) -> Self {
        self.solver = solver.into();
        self
    }

    /// Adds sequence prices, `dp_ranks` values; attention dp only.
    #[must_use]
    pub fn sequence_price(mut self, sequence_price: Vec<f32>) -> Self {
        self.sequence_price = Some(sequence_price);
        self
    }

    /// Sets the rank that reaches each of the G groups locally, if there are not G ranks.
    #[must_use]
    pub fn ranks(mut self, dp_ranks: u16, group_to_dp: Vec<RankId>) -> Self {
        self.dp_ranks = dp_ranks;
        self.group_to_dp = group_to_dp;
        self
    }

    /// Replaces the placement with one that has replicas.
    #[must_use]
    pub fn replicas(mut self, replicas: Replicas) -> Self {
        self.replicas = Some(replicas);
        self
    }

    /// Checks the parts and writes them to a file atomically; returns the digest.
    ///
    /// # Errors
    /// Names the invalid part, or the path that could not be written.
    pub fn write(&self, path: &Path) -> Result<String, FormatError> {
        self.clone().finish().map_err(|e| e.in_file(path))?.write(path)
    }

    /// Checks the parts and encodes the file.
    ///
    /// # Errors
    /// Names the invalid part.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        let bytes = self.unchecked_bytes()?;
        Tables::from_bytes(bytes.clone())?;
        Ok(bytes)
    }

    /// Checks the parts and returns the tables in memory.
    ///
    /// # Errors
    /// Names the invalid part.
    pub fn finish(self) -> Result<Tables, FormatError> {
        let bytes = self.unchecked_bytes()?;
        drop(self);
        Tables::from_bytes(bytes)
    }

    fn groups(&self) -> u16 {
        self.replicas.as_ref().map_or(self.placement.groups(), Replicas::groups)
    }

    fn unchecked_bytes(&self) -> Result<Vec<u8>, FormatError> {
        self.model.validate()?;
        let mut metadata = Layout::metadata(FORMAT, &self.model, &self.provenance);
        let mut put = |key: &str, value: String| metadata.insert(key.to_owned(), value);
        put("groups", self.groups().to_string());
        put("dp_ranks", self.dp_ranks.to_string());
        put("group_to_dp", list_to_json(&self.group_to_dp));
        put("solver", self.solver.clone());
        let (digest, placement) = match &self.replicas {
            Some(replicas) => (replicas.digest(), replicas.tensor()),
            None => (self.placement.digest(), self.placement.tensor()),
        };
        put("placement_digest", digest);
        let mut tensors = vec![placement, LayoutTensor::new("price", &[self.price.len()], &self.price)];
        tensors
            .extend(self.sequence_price.iter().map(|price| LayoutTensor::new("sequence_price", &[price.len()], price)));
        match &self.tokens {
            TokenParts::Dp(t) => {
                put("attention", Attention::Dp.to_string());
                tensors.push(sized("T", &[self.model.vocab_size as usize, usize::from(self.dp_ranks)], t)?);
            }
            TokenParts::Tp(parts) => {
                put("attention", Attention::Tp.to_string());
                put("labels", parts.labels.to_string());
                tensors.extend(self.tp_tensors(parts)?);
            }
        }
        Layout { metadata, tensors }.to_bytes()
    }

    fn tp_tensors<'a>(&self, parts: &'a TpParts) -> Result<[LayoutTensor<'a>; 4], FormatError> {
        let (layers, groups) = (self.model.layers(), usize::from(self.groups()));
        let tokens = [layers, self.model.vocab_size as usize, parts.labels];
        let transitions = [layers, groups, groups, parts.labels];
        Ok([
            sized("T_group", &tokens, &parts.token_group)?,
            sized("T_prob", &tokens, &parts.token_prob)?,
            sized("A_group", &transitions, &parts.transition_group)?,
            sized("A_prob", &transitions, &parts.transition_prob)?,
        ])
    }
}

/// Creates a tensor after checking that its elements fill the shape.
fn sized<'a, T: crate::container::Element>(
    name: &'static str,
    shape: &[usize],
    elements: &'a [T],
) -> Result<LayoutTensor<'a>, FormatError> {
    let size = shape.iter().try_fold(1usize, |size, &dim| size.checked_mul(dim));
    if size == Some(elements.len()) {
        return Ok(LayoutTensor::new(name, shape, elements));
    }
    Err(FormatError::shape(name, format!("{} elements", elements.len()), format!("{shape:?}")))
}
