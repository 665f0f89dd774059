//! Expert domains (HybridEP): groups that hold each other's experts, at one or several levels of links.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::FormatError;

/// Maximum number of levels inside the outermost one.
const MAX_INNER: usize = 7;

/// Sizes of expert domains, one for each level of links. Text form: the outermost size, then for each inner level its
/// size and the number of workers it connects. `2` pairs neighbours; `2:1/8` pairs groups at the same position on two
/// nodes of 8.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Domains {
    /// Domain size at the outermost level, which connects the blocks of groups formed by the inner levels.
    outermost: u16,
    /// Outermost first; unset levels have one worker.
    inner: [DomainLevel; MAX_INNER],
}

/// One level of a group's links.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DomainLevel {
    /// Workers per domain.
    size: u16,
    /// Workers connected at this level.
    of: u16,
}

/// Domains resolved for a given number of groups.
pub(crate) struct DomainMap {
    groups: u16,
    /// Levels, outermost first.
    levels: [DomainLevel; 1 + MAX_INNER],
}

impl Domains {
    /// No domains: each group is a domain of its own.
    pub const NONE: Self = Self { outermost: 1, inner: [DomainLevel { size: 1, of: 1 }; MAX_INNER] };

    /// Number of groups in a domain.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.inner.iter().fold(self.outermost.into(), |size: u64, level| size.saturating_mul(level.size.into()))
    }

    /// Whether the domains divide every level of `groups` groups evenly.
    #[must_use]
    pub fn divide(&self, groups: u16) -> bool {
        self.map(groups).is_ok()
    }

    /// Resolves the domains for `groups` groups.
    ///
    /// # Errors
    /// If the levels do not multiply to `groups`, or a size does not divide its level.
    pub(crate) fn map(&self, groups: u16) -> Result<DomainMap, FormatError> {
        let inside = self.inner.iter().try_fold(1u16, |inside, level| inside.checked_mul(level.of)).unwrap_or(0);
        let mut levels =
            [DomainLevel { size: self.outermost, of: groups.checked_div(inside).unwrap_or(0) }; 1 + MAX_INNER];
        levels[1..].copy_from_slice(&self.inner);
        let even = |level: &DomainLevel| level.size > 0 && level.of > 0 && level.of.is_multiple_of(level.size);
        if groups == 0 || inside == 0 || !groups.is_multiple_of(inside) || !levels.iter().all(even) {
            let expected = format!("sizes that divide the levels of {groups} groups");
            return Err(FormatError::field("domains", self, expected));
        }
        Ok(DomainMap { groups, levels })
    }
}

impl DomainMap {
    /// Returns the group that has the same position in the domain of `owner` as `place` has in its own domain.
    pub(crate) fn peer(&self, place: u16, owner: u16) -> u16 {
        let (mut inside, mut peer) = (1, 0);
        for DomainLevel { size, of } in self.levels.into_iter().rev() {
            let worker = |group: u16| group / inside % of;
            peer += inside * (worker(owner) / size * size + worker(place) % size);
            inside *= of;
        }
        peer
    }

    /// Returns the groups in the domain of `owner`, ascending.
    pub(crate) fn members(&self, owner: u16) -> Vec<u16> {
        (0..self.groups).filter(|&group| self.peer(group, owner) == group).collect()
    }
}

/// Single-level domains of consecutive groups.
impl From<u16> for Domains {
    fn from(size: u16) -> Self {
        Self { outermost: size, ..Self::NONE }
    }
}

impl Default for Domains {
    fn default() -> Self {
        Self::NONE
    }
}

impl fmt::Display for Domains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.outermost)?;
        let given = self.inner.iter().rposition(|level| level.of != 1).map_or(0, |last| last + 1);
        self.inner[..given].iter().try_for_each(|DomainLevel { size, of }| write!(f, ":{size}/{of}"))
    }
}

impl From<Domains> for String {
    fn from(domains: Domains) -> Self {
        domains.to_string()
    }
}

/// The text does not describe valid [`Domains`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected N, or sizes of up to {} levels, outermost first, as in 2:1/8", 1 + MAX_INNER)]
pub struct NoDomains;

impl TryFrom<String> for Domains {
    type Error = NoDomains;

    fn try_from(text: String) -> Result<Self, NoDomains> {
        text.parse()
    }
}

impl FromStr for Domains {
    type Err = NoDomains;

    fn from_str(text: &str) -> Result<Self, NoDomains> {
        let (outermost, inner) = text.split_once(':').map_or((text, None), |(first, rest)| (first, Some(rest)));
        let number = |text: &str| text.parse::<u16>().map_err(|_| NoDomains);
        let mut domains = Self::from(number(outermost)?);
        for (at, level) in inner.into_iter().flat_map(|inner| inner.split(':')).enumerate() {
            let (size, of) = level.split_once('/').ok_or(NoDomains)?;
            *domains.inner.get_mut(at).ok_or(NoDomains)? = DomainLevel { size: number(size)?, of: number(of)? };
        }
        Ok(domains)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domains(text: &str) -> Domains {
        text.parse().unwrap()
    }

    #[test]
    fn text_is_read_as_it_is_written() {
        for text in ["1", "4", "2:1/8", "1:2/2:3/3"] {
            assert_eq!(domains(text).to_string(), text);
            let json = serde_json::to_value(domains(text)).unwrap();
            assert_eq!(
                (&json, serde_json::from_value::<Domains>(json.clone()).unwrap()),
                (&text.into(), domains(text))
            );
        }
        assert_eq!((domains("2:4/8").size(), Domains::default()), (8, domains("1")));
        for wrong in ["", "two", "-1", "2:", "2:1", "2:1/", "65536", "1:1/1:1/1:1/1:1/1:1/1:1/1:1/1:1/1"] {
            assert!(wrong.parse::<Domains>().unwrap_err().to_string().contains("as in 2:1/8"), "{wrong}");
        }
    }

    #[test]
    fn domains_cross_the_levels_that_they_name() {
        let of = |text: &str, owner| domains(text).map(8).map(|map| map.members(owner)).unwrap();
        assert_eq!((of("2", 5), of("8", 5).len(), of("1", 5)), (vec![4, 5], 8, vec![5]));
        // Two nodes of four: both nodes at one position, half of each node, and both combined.
        assert_eq!((of("2:1/4", 5), of("1:2/4", 5), of("2:2/4", 5)), (vec![1, 5], vec![4, 5], vec![0, 1, 4, 5]));
        let pairs = domains("2:2/4").map(8).unwrap();
        assert_eq!([0, 1, 6, 7].map(|place| pairs.peer(place, 2)), [2, 3, 6, 7]);
    }

    #[test]
    fn levels_that_do_not_divide_are_refused() {
        for (text, groups) in [
            ("0", 8),
            ("3", 8),
            ("16", 8),
            ("2:1/3", 8),
            ("2:0/4", 8),
            ("2:1/0", 8),
            ("2:3/4", 8),
            ("1:1/300:1/300", 8),
            ("1", 0),
        ] {
            assert!(!domains(text).divide(groups), "{text} of {groups}");
            let error = domains(text).map(groups).err().unwrap().to_string();
            assert!(error.contains("domains"), "{error}");
        }
        assert!(domains("2:2/4").divide(8) && domains("1").divide(7));
    }
}
