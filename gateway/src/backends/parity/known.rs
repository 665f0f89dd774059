//! Summarizes for operators how a backend tokenizes chats, as seen in the built-in chats and in the token counts of
//! responses. Token counts can only prove a difference.

use semmoe_text::Shapes;

use crate::backends::Member;

/// Chat shapes by state; shapes in neither set are unproven.
pub(crate) struct Known {
    pub(crate) equal: Shapes,
    pub(crate) differs: Shapes,
}

impl Known {
    pub(crate) fn of(member: &Member) -> Self {
        let differs = member.misread(Shapes::ALL);
        Self { equal: member.fit.parity.equal.without(differs), differs }
    }

    /// Returns the metric label: `equal`, `differs` or `unproven`.
    pub(crate) fn state(&self) -> &'static str {
        match (self.differs.is_empty(), self.equal.is_empty()) {
            (false, _) => "differs",
            (true, false) => "equal",
            (true, true) => "unproven",
        }
    }

    pub(crate) fn unproven(&self) -> Shapes {
        Shapes::ALL.without(self.equal | self.differs)
    }

    /// Describes the first difference, or why a shape is unproven.
    pub(crate) fn detail(&self, member: &Member) -> Option<String> {
        let counted = member.backend.counts.differs().without(member.fit.parity.differs);
        let by_count = format!("the engine's token counts differ for chats of shape {counted}");
        let by_count = Some(by_count).filter(|_| !counted.is_empty() && member.fit.parity.differs.is_empty());
        let by_chats = || member.fit.parity.detail.as_deref().map(str::to_owned);
        by_count.or_else(by_chats).or_else(|| member.backend.last_probe()?.rendering.as_ref()?.cause.clone())
    }
}
