//! Heat map of tokens and experts: the paper's figure 6 (b). Tokens that share experts form bands.

use std::fmt::Write;

use semmoe_tables::{LayerIdx, Placement, Tables};

use super::Page;
use super::draw::{Cells, Scale, Svg};
use super::text::token;
use crate::show::Study;
use crate::show::rows::activations;
use crate::show::table1::hottest;

/// Number of tokens to draw, most frequent first.
pub(super) const TOKENS: usize = 120;
const ROW: f64 = 9.0;
const LEFT: f64 = 150.0;
const TOP: f64 = 62.0;

/// The heat map of one layer.
struct Map<'a> {
    study: &'a Study,
    page: &'a Page<'a>,
    layer: usize,
    /// The layer's placement, if known.
    placement: Option<&'a Placement>,
    /// Experts in drawing order.
    experts: Vec<usize>,
    tokens: Vec<usize>,
}

pub(super) fn picture(study: &Study, page: &Page<'_>, layer: usize) -> String {
    let rows = &study.rows;
    let placement = page.tables.map(Tables::placement).filter(|placement| layer < placement.layers());
    let mut map = Map { study, page, layer, placement, experts: Vec::new(), tokens: Vec::new() };
    let mut experts: Vec<usize> = (0..rows.experts).collect();
    experts.sort_by_key(|expert| (map.group(*expert), *expert));
    map.experts = experts;
    let mut tokens: Vec<usize> = (0..rows.vocabulary()).filter(|token| !rows.row(layer, *token).is_empty()).collect();
    tokens.sort_by_key(|token| (std::cmp::Reverse(rows.tokens[*token]), *token));
    tokens.truncate(TOKENS);
    tokens.sort_by_cached_key(|token| map.place(*token));
    map.tokens = tokens;
    map.draw()
}

impl Map<'_> {
    fn group(&self, expert: usize) -> u16 {
        self.placement.map_or(0, |placement| placement.layer(LayerIdx::new(self.layer as u16))[expert])
    }

    fn row(&self, token: usize) -> &[(u16, u32)] {
        self.study.rows.row(self.layer, token)
    }

    /// Returns a token's sort key: the group with most of its activations, then its hottest experts.
    fn place(&self, token: usize) -> (usize, Vec<usize>, usize) {
        let row = self.row(token);
        let place_of = |expert: u16| self.experts.iter().position(|other| *other == usize::from(expert)).unwrap_or(0);
        let mut shares = vec![0u64; usize::from(self.placement.map_or(1, Placement::groups))];
        row.iter().for_each(|(expert, count)| shares[usize::from(self.group((*expert).into()))] += u64::from(*count));
        // Ties go to the first group.
        let best = (0..shares.len()).rev().max_by_key(|at| shares[*at]).unwrap_or(0);
        (best, hottest(row).iter().map(|(expert, _)| place_of(*expert)).take(2).collect(), token)
    }

    /// Returns the tooltip for one expert, or for the token's hottest experts.
    fn tip(&self, token: usize, expert: Option<usize>) -> String {
        let row = self.row(token);
        let total = activations(row);
        let named = self.page.token_texts.get(token).map_or(String::new(), |text| format!(" {text:?}"));
        let mut tip = format!("token {token}{named}, {} times:", self.study.rows.tokens[token]);
        let is_shown = |other: u16| expert.is_none_or(|expert| usize::from(other) == expert);
        let shown = hottest(row).into_iter().filter(|(other, _)| is_shown(*other));
        for (expert, count) in shown.take(2 * self.study.rows.top_k) {
            let _ = write!(tip, " expert {expert} {:.3}", f64::from(count) / total);
        }
        tip
    }

    /// Returns each expert's share of a token's activations, in drawing order.
    fn shares(&self, token: usize) -> Vec<f64> {
        let row = self.row(token);
        let total = activations(row);
        let count = |expert: &usize| row.iter().find(|(other, _)| usize::from(*other) == *expert);
        self.experts.iter().map(|expert| count(expert).map_or(0.0, |(_, count)| f64::from(*count) / total)).collect()
    }

    fn draw(&self) -> String {
        let Self { study, page, layer, placement, experts, tokens } = self;
        let wide = (720.0 / experts.len() as f64).clamp(3.0, 24.0);
        let (width, height) = (LEFT + wide * experts.len() as f64 + 20.0, TOP + ROW * tokens.len() as f64 + 56.0);
        let mut svg = Svg::new(width.max(560.0), height);
        let most = 1.0 / study.rows.top_k as f64;
        let shares: Vec<Vec<f64>> = tokens.iter().map(|token| self.shares(*token)).collect();
        let cells = Cells { x: LEFT, y: TOP, wide, high: ROW, rows: &shares, scale: Scale::Up(most) };
        svg.cells(&cells);
        svg.tips(&cells, |row, column| self.tip(tokens[row], column.map(|at| experts[at])));
        let labels: Vec<String> = experts.iter().map(usize::to_string).collect();
        svg.columns(LEFT, TOP - 6.0, wide, &labels);
        for at in (1..experts.len()).filter(|at| self.group(experts[*at]) != self.group(experts[*at - 1])) {
            let x = LEFT + at as f64 * wide;
            svg.line(x, TOP - 18.0, x, TOP + ROW * tokens.len() as f64, "stroke=\"#d55e00\" stroke-width=\"1.5\"");
        }
        let (title, order) = match placement {
            Some(placement) => (
                format!("experts, in the tables' {} groups", placement.groups()),
                "Experts are ordered by the tables' groups, tokens by the group with most of their activations.",
            ),
            None => (
                "experts".into(),
                "Tokens are ordered by their hottest experts; with <code>--tables</code>, experts and tokens are ordered by group.",
            ),
        };
        svg.text(LEFT, TOP - 32.0, "start", "", &title);
        for (at, id) in tokens.iter().enumerate() {
            let label = page.token_texts.get(*id).map_or(format!("id {id}"), |text| token(text));
            svg.text(LEFT - 6.0, TOP + at as f64 * ROW + ROW - 1.5, "end", "token", &label);
        }
        svg.upright(12.0, TOP + ROW * tokens.len() as f64 / 2.0, "tokens");
        let (half, full) = (format!("{:.2}", most / 2.0), format!("{most:.2}"));
        svg.legend(
            LEFT,
            height - 28.0,
            Scale::Up(most),
            "share of the token's activations (1/k: every time)",
            ["0", &half, &full],
        );
        let id = study.rows.layer_ids[*layer];
        let label = format!("Heat map of {} tokens and {} experts in layer {id}", tokens.len(), experts.len());
        format!(
            "<p>How often the {} most frequent tokens activate each expert of layer {id}. {order} A white row with few dark cells means that the \
             token's experts hardly depend on context.</p>\n{}",
            tokens.len(),
            svg.finish(&label)
        )
    }
}
