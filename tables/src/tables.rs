//! Tables: the solver's output for gateways and workers (T, A, E and prices).

use std::fs::File;

use half::f16;

use crate::attention::{LabelViews, dp_view};
use crate::container::{Container, View};
use crate::model::{check_text, json_list, number, quoted, text};
use crate::{
    Attention, FormatError, GroupId, GroupLabels, LayerIdx, MAX_LABELS, ModelInfo, NO_GROUP, Placement, Provenance,
    RankId, Replicas, TokenId,
};

/// The `format` field of tables.
pub(crate) const FORMAT: &str = "semmoe.tables";
/// Prefix of the held-out local activation rate in the `solver` field.
const PROMISE: &str = "held_out_lar=";
/// An optional tensor, absent from files written before it was introduced.
const SEQUENCE_PRICE: &str = "sequence_price";
/// The tensors for attention dp other than the placement.
const TENSORS_DP: &[&str] = &["T", "price", SEQUENCE_PRICE];
const TENSORS_TP: &[&str] = &["T_group", "T_prob", "A_group", "A_prob", "price"];

/// Tables, validated when opened.
#[derive(Debug)]
pub struct Tables {
    pub(crate) container: Container,
    model: ModelInfo,
    provenance: Provenance,
    solver: String,
    groups: u16,
    dp_ranks: u16,
    group_to_dp: Vec<RankId>,
    placement: Placement,
    replicas: Option<Replicas>,
    placement_digest: String,
    price: View<f32>,
    sequence_price: Option<View<f32>>,
    tokens: TokenViews,
}

#[derive(Debug)]
enum TokenViews {
    Dp(View<f16>),
    Tp { tokens: LabelViews, transitions: LabelViews },
}

format_file!(Tables, FORMAT);

impl Tables {
    /// Maps a file that is already open; the caller must prevent others from writing to it.
    ///
    /// # Errors
    /// Names the field or tensor, what was found and what was expected.
    pub fn map(file: &File) -> Result<Self, FormatError> {
        Self::checked(Container::map(file, FORMAT)?)
    }

    fn from_container(container: Container) -> Result<Self, FormatError> {
        let metadata = &container.metadata;
        let model = ModelInfo::from_metadata(metadata)?;
        let provenance = Provenance::from_metadata(metadata)?;
        let solver = text(metadata, "solver")?.to_owned();
        check_text("solver", &solver)?;
        let attention: Attention = text(metadata, "attention")?.parse()?;
        let (groups, dp_ranks, group_to_dp) = read_ranks(&container)?;
        let replicas = read_replicas(&container, &model, groups)?;
        let placed_by = if replicas.is_some() { "physical_to_logical" } else { "E" };
        let known = if attention == Attention::Dp { TENSORS_DP } else { TENSORS_TP };
        container.expect_only(FORMAT, &[known, &[placed_by]].concat())?;
        let placement = match &replicas {
            Some(replicas) => replicas.primary(),
            None => read_placement(&container, &model, groups)?,
        };
        let placement_digest = replicas.as_ref().map_or_else(|| placement.digest(), Replicas::digest);
        check_placement_digest(&container, &placement_digest)?;
        let vocabulary = u64::from(model.vocab_size);
        let (tokens, prices) = match attention {
            Attention::Dp => {
                let view = dp_view(&container, vocabulary, dp_ranks, replicas.is_some())?;
                (TokenViews::Dp(view), dp_ranks)
            }
            Attention::Tp => (read_tp(&container, &model, groups)?, groups),
        };
        let price = container.view("price", &[u64::from(prices)])?;
        check_prices("price", container.slice(&price))?;
        let sequence_price = container.has(SEQUENCE_PRICE);
        let sequence_price =
            sequence_price.then(|| container.view(SEQUENCE_PRICE, &[u64::from(prices)])).transpose()?;
        sequence_price.iter().try_for_each(|view| check_prices(SEQUENCE_PRICE, container.slice(view)))?;
        Ok(Tables {
            container,
            model,
            provenance,
            solver,
            groups,
            dp_ranks,
            group_to_dp,
            placement,
            replicas,
            placement_digest,
            price,
            sequence_price,
            tokens,
        })
    }

    /// Name and settings of the solver.
    pub fn solver(&self) -> &str {
        &self.solver
    }

    /// Returns the nodes that the tables were solved for, according to the solver field: M nodes of G/M consecutive
    /// groups. Returns `None` if unknown.
    pub fn solved_nodes(&self) -> Option<u16> {
        let named = |word: &str| word.strip_prefix("nodes=").and_then(|nodes| nodes.parse().ok());
        self.solver.strip_prefix("semmoe-solver ").and_then(|settings| settings.split(' ').find_map(named))
    }

    /// Returns the local activation rate, in [0, 1], that the solver measured on held-out requests, or `None` if the
    /// solver field does not contain it.
    pub fn promised_lar(&self) -> Option<f64> {
        let named = |word: &str| word.strip_prefix(PROMISE).and_then(|rate| rate.parse().ok());
        let promised: Option<f64> = self.solver.split(' ').find_map(named);
        promised.filter(|rate| (0.0..=1.0).contains(rate))
    }

    /// Returns the tables with this promised rate, rounded to four digits.
    ///
    /// # Errors
    /// If the solver field becomes too long.
    pub fn with_promised_lar(&self, rate: f64) -> Result<Self, FormatError> {
        let mut layout = self.container.layout();
        layout.metadata.insert("solver".into(), format!("{} {PROMISE}{rate:.4}", self.solver));
        Self::from_bytes(layout.to_bytes()?)
    }

    /// How the unit's attention is parallelised.
    pub fn attention(&self) -> Attention {
        match self.tokens {
            TokenViews::Dp(_) => Attention::Dp,
            TokenViews::Tp { .. } => Attention::Tp,
        }
    }

    /// Number of groups, G.
    pub fn groups(&self) -> u16 {
        self.groups
    }

    /// Number of attention-DP ranks.
    pub fn dp_ranks(&self) -> u16 {
        self.dp_ranks
    }

    /// Returns the attention-DP rank that reaches each group locally, \[G\].
    pub fn group_to_dp(&self) -> &[RankId] {
        &self.group_to_dp
    }

    /// E. With replicas, one of the groups of each expert ([`Replicas::primary`]).
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The expert in each slot, if the tables have replicas.
    pub fn physical_to_logical(&self) -> Option<&Replicas> {
        self.replicas.as_ref()
    }

    /// Returns the experts of a layer in the slot order of engines, group by group, \[S\]: S / G slots per group,
    /// ascending within a group, -1 = padding. Without replicas S is N.
    pub(crate) fn slots(&self, layer: LayerIdx) -> Vec<i32> {
        if let Some(replicas) = &self.replicas {
            return replicas.layer(layer).to_vec();
        }
        let groups = (0..self.groups).map(GroupId::new);
        groups.flat_map(|group| self.placement.experts_of(layer, group)).map(|expert| i32::from(expert.get())).collect()
    }

    /// S: slots per layer.
    pub(crate) fn slots_per_layer(&self) -> usize {
        self.replicas.as_ref().map_or(usize::from(self.model.num_experts), Replicas::slots)
    }

    /// SHA-256 of only the placement, as lower-case hex: a backend with a different placement must not receive these
    /// tables.
    pub fn placement_digest(&self) -> &str {
        &self.placement_digest
    }

    /// SHA-256 over all tensors, as lower-case hex.
    pub fn digest(&self) -> &str {
        self.container.digest()
    }

    /// Dual prices as fractions of a token's activations: `dp_ranks` values with attention dp, \[G\] with tp.
    pub fn price(&self) -> &[f32] {
        self.container.slice(&self.price)
    }

    /// Dual prices of a sequence on each of the `dp_ranks`, as fractions of a mean-sized request's activations. Empty,
    /// meaning zero, if the tables have none.
    pub fn sequence_price(&self) -> &[f32] {
        self.sequence_price.as_ref().map_or(&[], |view| self.container.slice(view))
    }

    /// T with attention dp: the share of the token's activations expected to be local on each of the `dp_ranks`. `None`
    /// for ids outside the vocabulary and with attention tp.
    pub fn token_row(&self, token: TokenId) -> Option<&[f16]> {
        let TokenViews::Dp(view) = &self.tokens else { return None };
        let ranks = usize::from(self.dp_ranks);
        let start = token.index().checked_mul(ranks)?;
        self.container.slice(view).get(start..start + ranks)
    }

    /// m: labels per token and layer with attention tp; 0 with dp.
    pub fn labels(&self) -> usize {
        match &self.tokens {
            TokenViews::Dp(_) => 0,
            TokenViews::Tp { tokens, .. } => tokens.labels,
        }
    }

    /// T with attention tp: the likeliest groups of a token in a layer. `None` without evidence, for ids out of range
    /// and with attention dp.
    pub fn token_groups(&self, layer: LayerIdx, token: TokenId) -> Option<GroupLabels<'_>> {
        let TokenViews::Tp { tokens, .. } = &self.tokens else { return None };
        if token.get() >= self.model.vocab_size || layer.index() >= self.model.layers() {
            return None;
        }
        tokens.row(&self.container, layer.index() * self.model.vocab_size as usize + token.index())
    }

    /// A with attention tp: the likeliest groups in a layer, given those of the two previous MoE layers. `None` without
    /// evidence, for ids out of range and with attention dp.
    pub fn next_groups(&self, layer: LayerIdx, older: GroupId, newer: GroupId) -> Option<GroupLabels<'_>> {
        let TokenViews::Tp { transitions, .. } = &self.tokens else { return None };
        let g = usize::from(self.groups);
        if layer.index() >= self.model.layers() || older.index() >= g || newer.index() >= g {
            return None;
        }
        transitions.row(&self.container, (layer.index() * g + older.index()) * g + newer.index())
    }
}

fn read_ranks(container: &Container) -> Result<(u16, u16, Vec<RankId>), FormatError> {
    let metadata = &container.metadata;
    let groups: u16 = number(metadata, "groups")?;
    if groups == 0 || groups == NO_GROUP {
        return Err(FormatError::field("groups", groups, "1 to 65534"));
    }
    let dp_ranks: u16 = number(metadata, "dp_ranks")?;
    if dp_ranks == 0 {
        return Err(FormatError::field("dp_ranks", dp_ranks, "at least 1"));
    }
    let group_to_dp = json_list(metadata, "group_to_dp")?;
    if group_to_dp.len() != usize::from(groups) {
        let found = format!("{} ranks long", group_to_dp.len());
        return Err(FormatError::field("group_to_dp", found, format!("one rank for each of {groups} groups")));
    }
    if let Some(rank) = group_to_dp.iter().find(|&&rank| rank >= dp_ranks) {
        let expected = format!("ranks below dp_ranks ({dp_ranks})");
        return Err(FormatError::field("group_to_dp", format!("rank {rank}"), expected));
    }
    Ok((groups, dp_ranks, group_to_dp.into_iter().map(RankId::new).collect()))
}

fn read_replicas(container: &Container, model: &ModelInfo, groups: u16) -> Result<Option<Replicas>, FormatError> {
    const NAME: &str = "physical_to_logical";
    if !container.has(NAME) {
        return Ok(None);
    }
    let shape = container.shape(NAME)?;
    let &[layers, slots] = shape else {
        return Err(FormatError::shape(NAME, format!("{shape:?}"), "[layers, slots]"));
    };
    let view = container.view::<i32>(NAME, &[layers, slots])?;
    let logical = container.slice(&view).to_vec();
    Replicas::new(model, groups, usize::try_from(slots).unwrap_or(usize::MAX), logical).map(Some)
}

fn read_placement(container: &Container, model: &ModelInfo, groups: u16) -> Result<Placement, FormatError> {
    let view = container.view::<u16>("E", &[model.layers() as u64, u64::from(model.num_experts)])?;
    Placement::from_flat(groups, model.num_experts, container.slice(&view).to_vec())
}

fn check_placement_digest(container: &Container, computed: &str) -> Result<(), FormatError> {
    let stated = text(&container.metadata, "placement_digest")?;
    if stated == computed {
        return Ok(());
    }
    let expected = format!("{computed}, the digest of the placement in the file");
    Err(FormatError::field("placement_digest", quoted(stated), expected))
}

fn read_tp(container: &Container, model: &ModelInfo, groups: u16) -> Result<TokenViews, FormatError> {
    let labels: u16 = number(&container.metadata, "labels")?;
    if labels == 0 || usize::from(labels) > MAX_LABELS {
        return Err(FormatError::field("labels", labels, format!("1 to {MAX_LABELS}")));
    }
    let (layers, g, m) = (model.layers() as u64, u64::from(groups), u64::from(labels));
    let shape = [layers, u64::from(model.vocab_size), m];
    let tokens = LabelViews::open(container, "T_group", "T_prob", &shape, groups)?;
    let transitions = LabelViews::open(container, "A_group", "A_prob", &[layers, g, g, m], groups)?;
    Ok(TokenViews::Tp { tokens, transitions })
}

fn check_prices(tensor: &'static str, prices: &[f32]) -> Result<(), FormatError> {
    match prices.iter().position(|price| !price.is_finite()) {
        None => Ok(()),
        Some(at) => Err(FormatError::value(tensor, format!("index {at}"), prices[at], "a finite number")),
    }
}
