//! Subtracts one profile from another.

use crate::profile::check_routed;
use crate::profile_builder::Columns;
use crate::{FormatError, LayerIdx, Profile, ProfileRow, TokenId};

impl Profile {
    /// Returns this profile without the counts of `part`, the inverse of merging. Returns `None` if `part` is not
    /// contained in this profile: a count would become negative, or the remainder could not be the counts of any
    /// tokens.
    ///
    /// # Errors
    /// If `part` belongs to a different model or phase.
    pub fn without(&self, part: &Profile) -> Result<Option<Profile>, FormatError> {
        self.model().check_compatible(part.model())?;
        if part.phase() != self.phase() {
            return Err(FormatError::PhaseMismatch { found: part.phase(), expected: self.phase() });
        }
        let Some(columns) = self.columns_without(part) else { return Ok(None) };
        let bytes = columns.layout(self.model(), self.provenance(), self.phase()).to_bytes()?;
        drop(columns);
        Profile::from_bytes(bytes).map(Some)
    }

    fn columns_without(&self, part: &Profile) -> Option<Columns> {
        let vocabulary = self.model().vocab_size;
        let counts = self.token_counts().iter().zip(part.token_counts());
        let token_count: Vec<u64> = counts.map(|(&all, &part)| all.checked_sub(part)).collect::<Option<_>>()?;
        let mut columns = Columns { token_count, ..Columns::default() };
        let mut routed = vec![false; vocabulary as usize];
        for layer in 0..self.model().layers() {
            let start = layer * (vocabulary as usize + 1);
            let layer = LayerIdx::new(layer as u16);
            for token in (0..vocabulary).map(TokenId::new) {
                columns.start_rows_up_to(start + token.index());
                let before = columns.count.len();
                push_difference(&mut columns, self.row(layer, token), part.row(layer, token))?;
                let left = &columns.count[before..];
                let sum: u64 = left.iter().map(|&count| u64::from(count)).sum();
                // A token activates k different experts in a layer, each once.
                let known = sum / u64::from(self.model().top_k);
                if known > columns.token_count[token.index()] || left.iter().any(|&count| u64::from(count) > known) {
                    return None;
                }
                routed[token.index()] |= known > 0;
            }
            columns.start_rows_up_to(start + vocabulary as usize);
        }
        check_routed(&columns.token_count, &routed).ok().map(|()| columns)
    }
}

/// Appends the row `all - part` without its zeros; `None` if a count would become negative.
fn push_difference(columns: &mut Columns, all: ProfileRow<'_>, part: ProfileRow<'_>) -> Option<()> {
    let mut parts = part.experts.iter().zip(part.counts).peekable();
    for (&expert, &count) in all.experts.iter().zip(all.counts) {
        let taken = parts.next_if(|&(&of_part, _)| of_part == expert).map_or(0, |(_, &taken)| taken);
        let left = count.checked_sub(taken)?;
        if left > 0 {
            columns.expert.push(expert);
            columns.count.push(left);
        }
    }
    // Both rows are ascending, so any remaining entry of `part` is missing from `all`.
    parts.next().is_none().then_some(())
}
