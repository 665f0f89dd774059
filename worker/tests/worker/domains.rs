//! Expert domains: ranks that hold each other's experts. Traffic between domains is counted exactly.

use crate::common;
use crate::support;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use crate::common::{contiguous, golden, metered_mesh};
use crate::support::{Unit, refused};
use semmoe_tables::{ExpertCopies, LayerIdx};
use semmoe_worker::ExpertLayout;
use semmoe_worker::ep::LevelBytes;

const WORLD: u16 = 4;

/// Bytes by level of a prompt on `rank`, with domains as nodes, by Transformers' recorded routing: a token is sent once
/// to each domain that has some of its experts. `domain_of` is by rank.
fn recorded(experts: &[Vec<Vec<u16>>], rank: usize, domain_of: [u16; WORLD as usize]) -> LevelBytes {
    let (hidden, placement) = (common::config().hidden, contiguous(WORLD));
    let mut levels = LevelBytes::default();
    for (layer, tokens) in experts.iter().enumerate() {
        let groups = placement.layer(LayerIdx::new(layer as u16));
        let mut messages = BTreeMap::<u16, u64>::new();
        for experts in tokens {
            let mut of_domains = BTreeMap::<u16, usize>::new();
            for expert in experts {
                *of_domains.entry(domain_of[usize::from(groups[usize::from(*expert)])]).or_default() += 1;
            }
            for (domain, count) in of_domains {
                *messages.entry(domain).or_insert(8) += (2 * 4 * hidden + 2 + 6 * count) as u64;
            }
        }
        for (domain, bytes) in messages {
            *(if domain == domain_of[rank] { &mut levels.rank } else { &mut levels.other }) += bytes;
        }
    }
    levels
}

#[test]
fn what_leaves_a_domain_is_what_the_recorded_routing_says() {
    let golden = golden();
    let of_rank = |rank: usize| &golden[rank % golden.len()];
    for (domains, domain_of) in
        [("1", [0, 1, 2, 3]), ("2", [0, 0, 1, 1]), ("2:1/2", [0, 1, 0, 1]), ("1:2/2", [0, 0, 1, 1]), ("4", [0; 4])]
    {
        let copies = ExpertCopies::in_domains(&contiguous(WORLD), domains.parse().unwrap()).unwrap();
        let (transports, meters) = metered_mesh(WORLD);
        let counted = common::on_ranks(transports, &copies, |mut rank| {
            let own = domain_of[rank.rank];
            rank.ep = rank.ep.with_neighbours((0..domain_of.len()).filter(|&peer| domain_of[peer] == own));
            drop(rank.prefill(&of_rank(rank.rank).ids));
            rank.counted()
        });
        for (rank, counted) in counted.iter().enumerate() {
            let expected = recorded(&of_rank(rank).experts, rank, domain_of);
            assert_eq!(counted.levels, expected, "rank {rank}, domains of {domains}");
        }
        let sent: u64 = meters.iter().map(|[sent, _]| sent.load(Ordering::Relaxed)).sum();
        assert_eq!(sent, counted.iter().map(|counted| counted.levels.other).sum::<u64>(), "domains of {domains}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unit_in_domains_serves_and_counts_by_level() {
    let unit = Unit::start_with(WORLD, |config| (config.domains, config.nodes) = (2.into(), Some(2)));
    unit.serves_golden().await;
    assert_eq!(unit.get("/server_info").await["ep_num_redundant_experts"], support::EXPERTS);
    let metrics = unit.metrics().await;
    let level = |level: &str| metrics.sum("semmoe_level_bytes_total", &[("level", level)]);
    assert_eq!(level("node"), 0, "the other rank of the node holds the same experts");
    assert_eq!(level("other"), metrics.sum("semmoe_dispatch_bytes_total", &[("where", "remote")]));
    unit.end();
}

#[test]
fn domains_that_cannot_be_are_refused_in_a_sentence() {
    for domains in ["0", "3", "8", "2:1/3", "1:2/8"] {
        let expected = format!("expert domains of {domains} ranks do not divide the world of 4");
        assert_eq!(refused(WORLD, |config| config.domains = domains.parse().unwrap()), expected);
    }
    assert_eq!(
        refused(WORLD, |config| (config.domains, config.experts) = (2.into(), ExpertLayout::Tp)),
        "expert domains require experts ep, but this unit has experts tp"
    );
    assert_eq!(
        refused(WORLD, |config| (config.domains, config.tables) = (2.into(), Some("some.tables".into()))),
        "expert domains of 2 ranks and the tables in some.tables both define the placement: use only one of them"
    );
}
