//! How pins are sent, per engine, version and route.
//!
//! | engine | chat, completions | responses, messages | `/generate` |
//! |---|---|---|---|
//! | sglang from 0.5.23, semmoe | header | header | field `routed_dp_rank` |
//! | sglang 0.5.10 to 0.5.22 | header | - | field `routed_dp_rank` |
//! | sglang 0.5.8, 0.5.9 | field `data_parallel_rank` | - | field `data_parallel_rank` |
//! | sglang 0.4.7 to 0.5.7 | - | - | field `data_parallel_rank` |
//! | sglang before | - | - | - |
//! | vllm | header | messages: header | - |
//! | any, with a URL for each rank | URL | URL | URL |
//!
//! The header is `x-data-parallel-rank`. An engine that does not report its version is assumed to run the newest one;
//! in any case, pins are verified on each route (see [`crate::verify`]). SGLang's Responses route ignores pins in
//! 0.5.19 and reads the header in 0.5.23; versions in between are assumed to ignore it. vLLM's Responses route ignores
//! pins in 0.30 and 0.32, although its other routes read them.
//!
//! The table lists the assumptions made without evidence ([`Dialect::reads`]). In unknown versions, an engine that
//! reads the header on chats may also read it on other OpenAI routes, so those routes are probed too
//! ([`Dialect::carrier`]).

use serde::{Deserialize, Serialize};

use crate::{Engine, Route, Version};

/// Body field that SGLang has read since 0.5.10.
pub const ROUTED_DP_RANK: &str = "routed_dp_rank";
/// Body field that SGLang read before 0.5.10.
pub const DATA_PARALLEL_RANK: &str = "data_parallel_rank";

const GENERATE_FIELD: Version = Version::new(0, 4, 7);
const OPENAI_FIELD: Version = Version::new(0, 5, 8);
const HEADER: Version = Version::new(0, 5, 10);
const RESPONSES_HEADER: Version = Version::new(0, 5, 23);

/// The part of a request that carries its pin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// The rank is in the header [`crate::pin::HEADER`].
    Header,
    /// The rank is in this field of the body.
    Field(&'static str),
    /// The URL implies the rank: each rank has its own URL.
    Url,
}

/// How vLLM numbers ranks in pins when an API server serves only some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankBase {
    /// The first rank behind a URL has its global number (vLLM's Rust front end).
    Global,
    /// The first rank behind a URL is 0 (vLLM's Python front end with `--data-parallel-hybrid-lb`).
    Local,
}

/// An optional [`Carrier`], encoded in one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    None,
    Header,
    RoutedField,
    OlderField,
    Url,
}

impl Way {
    fn carrier(self) -> Option<Carrier> {
        match self {
            Self::None => None,
            Self::Header => Some(Carrier::Header),
            Self::RoutedField => Some(Carrier::Field(ROUTED_DP_RANK)),
            Self::OlderField => Some(Carrier::Field(DATA_PARALLEL_RANK)),
            Self::Url => Some(Carrier::Url),
        }
    }

    fn only_if(self, read: bool) -> Self {
        if read { self } else { Self::None }
    }
}

/// How to pin requests on one engine, as determined by probing. Kept small because every sampled request stores a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialect {
    engine: Engine,
    openai: Way,
    responses: Way,
    messages: Way,
    generate: Way,
    /// Number that pins use for the first rank.
    first_rank: u16,
    /// Number of ranks behind each URL; `None` if one URL serves all ranks.
    ranks_per_url: Option<u16>,
    rank_base: RankBase,
    /// Whether the engine reports no ranks, in which case no pin is trusted until it is proven to work.
    unproven: bool,
}

impl Dialect {
    /// Returns the dialect of an engine; `version` is `None` if not reported.
    pub fn of(engine: Engine, version: Option<Version>) -> Self {
        let [openai, responses, messages, generate] = match engine {
            Engine::Openai => [Way::None; 4],
            // vLLM handles messages as chats.
            Engine::Vllm => [Way::Header, Way::None, Way::Header, Way::None],
            Engine::Semmoe | Engine::Sglang => {
                let [openai, responses, generate] = Self::sglang(version.filter(|_| engine == Engine::Sglang));
                // SGLang 0.5.23 reads pins on responses and messages; no earlier version is known to.
                [openai, responses, responses, generate]
            }
        };
        let (first_rank, ranks_per_url, rank_base) = (0, None, RankBase::Global);
        Self { engine, openai, responses, messages, generate, first_rank, ranks_per_url, rank_base, unproven: false }
    }

    /// Returns the carriers for the OpenAI routes, for responses and messages, and for `/generate`.
    fn sglang(version: Option<Version>) -> [Way; 3] {
        let since = |first: Version| version.is_none_or(|version| version >= first);
        if since(HEADER) {
            return [Way::Header, Way::Header.only_if(since(RESPONSES_HEADER)), Way::RoutedField];
        }
        let field = Way::OlderField;
        [field.only_if(since(OPENAI_FIELD)), Way::None, field.only_if(since(GENERATE_FIELD))]
    }

    /// Returns the dialect of an engine with one URL per rank.
    pub fn by_url(engine: Engine) -> Self {
        let (url, ranks_per_url) = (Way::Url, Some(1));
        Self { openai: url, responses: url, messages: url, generate: url, ranks_per_url, ..Self::unpinned(engine) }
    }

    /// Returns the dialect of an engine that ignores pins, or whose ranks are not known well enough to send any.
    pub fn unpinned(engine: Engine) -> Self {
        Self { engine, ..Self::of(Engine::Openai, None) }
    }

    /// Sets one URL per node, in rank order, with this many ranks behind each.
    #[must_use]
    pub fn with_nodes(self, ranks_per_url: u16, rank_base: RankBase) -> Self {
        Self { ranks_per_url: Some(ranks_per_url), rank_base, ..self }
    }

    /// Sets the number that pins use for the first rank behind this URL.
    #[must_use]
    pub fn with_first_rank(self, first_rank: u16) -> Self {
        Self { first_rank, ..self }
    }

    /// Records that the number of ranks was not reported by the engine itself, so that no pin is trusted until proven.
    #[must_use]
    pub fn unproven(self) -> Self {
        Self { unproven: true, ..self }
    }

    /// Returns the engine of this dialect.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Returns the carrier from which this engine version is expected to read pins on `route`.
    pub fn reads(&self, route: Route) -> Option<Carrier> {
        self.carrier_of(route).filter(|carrier| !self.unproven || *carrier == Carrier::Url)
    }

    fn carrier_of(&self, route: Route) -> Option<Carrier> {
        match route {
            Route::Chat | Route::Completions => self.openai.carrier(),
            Route::Responses => self.responses.carrier(),
            Route::Messages => self.messages.carrier(),
            Route::Generate => self.generate.carrier(),
            // Embedding requests can be pinned only by a URL per rank.
            Route::Embeddings => self.openai.only_if(self.openai == Way::Url).carrier(),
            Route::Tokenize | Route::Detokenize | Route::CountTokens | Route::Extra => None,
        }
    }

    /// Returns the carrier for sending a pin on `route`: the one that the engine reads, or else one that it might read.
    /// `None` if the engine certainly ignores pins there.
    pub fn carrier(&self, route: Route) -> Option<Carrier> {
        let may_read = matches!(route, Route::Responses | Route::Messages) && self.openai == Way::Header;
        self.carrier_of(route).or_else(|| self.openai.only_if(may_read).carrier())
    }

    /// Returns whether responses on `route` report the rank that ran the request.
    pub fn names_rank(&self, route: Route) -> bool {
        self.engine == Engine::Semmoe || route == Route::Generate && self.generate == Way::RoutedField
    }

    /// Returns the value of a rank's pin: the rank in the engine's numbering.
    pub fn wire_rank(&self, rank: semmoe_tables::RankId) -> u32 {
        match (self.ranks_per_url, self.rank_base) {
            (Some(on_a_node), RankBase::Local) => u32::from(rank.get() % on_a_node.max(1)),
            _ => u32::from(self.first_rank) + u32::from(rank.get()),
        }
    }

    /// Returns the index of the URL that serves a rank.
    pub fn url_index(&self, rank: semmoe_tables::RankId) -> usize {
        self.ranks_per_url.map_or(0, |ranks| usize::from(rank.get() / ranks.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use semmoe_tables::RankId;

    const ROUTES: [Route; 9] = Route::ALL;

    #[test]
    fn carriers_by_version() {
        const H: Option<Carrier> = Some(Carrier::Header);
        const NEW: Option<Carrier> = Some(Carrier::Field("routed_dp_rank"));
        const OLD: Option<Carrier> = Some(Carrier::Field("data_parallel_rank"));
        // In the order of `Route::ALL`: chat, completions, responses, embeddings, generate, tokenize, messages,
        // detokenize, count_tokens.
        for (engine, version, expected) in [
            (Engine::Sglang, Some("0.5.23"), [H, H, H, None, NEW, None, H, None, None]),
            (Engine::Sglang, Some("0.6.0"), [H, H, H, None, NEW, None, H, None, None]),
            (Engine::Sglang, None, [H, H, H, None, NEW, None, H, None, None]),
            (Engine::Sglang, Some("0.5.19"), [H, H, None, None, NEW, None, None, None, None]),
            (Engine::Sglang, Some("0.5.10rc0"), [H, H, None, None, NEW, None, None, None, None]),
            (Engine::Sglang, Some("0.5.9.post1"), [OLD, OLD, None, None, OLD, None, None, None, None]),
            (Engine::Sglang, Some("0.5.8"), [OLD, OLD, None, None, OLD, None, None, None, None]),
            (Engine::Sglang, Some("0.5.7"), [None, None, None, None, OLD, None, None, None, None]),
            (Engine::Sglang, Some("0.4.7"), [None, None, None, None, OLD, None, None, None, None]),
            (Engine::Sglang, Some("0.4.6"), [None; 9]),
            // The worker has its own version numbers.
            (Engine::Semmoe, Some("0.1.0"), [H, H, H, None, NEW, None, H, None, None]),
            (Engine::Vllm, Some("0.33.0"), [H, H, None, None, None, None, H, None, None]),
            (Engine::Openai, None, [None; 9]),
        ] {
            let dialect = Dialect::of(engine, version.and_then(Version::parse));
            assert_eq!(ROUTES.map(|route| dialect.reads(route)), expected, "{engine} {version:?}");
            for (route, reads) in ROUTES.into_iter().zip(expected) {
                let may_read = [Route::Responses, Route::Messages].contains(&route) && expected[0] == H;
                let carrier = dialect.carrier(route);
                assert_eq!(carrier, if may_read { H } else { reads }, "{engine} {version:?} {route}");
            }
        }
        let url = Some(Carrier::Url);
        let found = ROUTES.map(|route| Dialect::by_url(Engine::Openai).carrier(route));
        assert_eq!(found, [url, url, url, url, url, None, url, None, None]);
    }

    #[test]
    fn ranks_are_counted_as_the_engine_counts() {
        let dialect = Dialect::of(Engine::Vllm, None);
        assert_eq!(dialect.wire_rank(RankId::new(3)), 3);
        assert_eq!(dialect.with_first_rank(4).wire_rank(RankId::new(3)), 7);
        assert_eq!(dialect.with_first_rank(u16::MAX).wire_rank(RankId::new(u16::MAX)), 131_070);
    }

    #[test]
    fn ranks_of_nodes_are_behind_their_urls() {
        let nodes = |base| Dialect::of(Engine::Vllm, None).with_nodes(4, base);
        let (local, global) = (nodes(RankBase::Local), nodes(RankBase::Global));
        for (rank, url, wire) in [(0, 0, 0), (3, 0, 3), (4, 1, 0), (7, 1, 3), (9, 2, 1)] {
            let rank = RankId::new(rank);
            assert_eq!((local.url_index(rank), local.wire_rank(rank)), (url, wire));
            assert_eq!((global.url_index(rank), global.wire_rank(rank)), (url, u32::from(rank.get())));
        }
        let by_url = Dialect::by_url(Engine::Openai);
        assert_eq!((by_url.url_index(RankId::new(3)), local.carrier(Route::Chat)), (3, Some(Carrier::Header)));
        assert!(Dialect::unpinned(Engine::Vllm).carrier(Route::Chat).is_none());
        let unproven = local.unproven();
        assert_eq!((unproven.carrier(Route::Chat), unproven.reads(Route::Chat)), (Some(Carrier::Header), None));
    }
}
