//! Experts that move while sequences run: every step equals, bit for bit, that of ranks that were loaded with the
//! current placement.

use std::path::Path;

use crate::common::{
    FIXTURES, Rank, argmax, contiguous_of, fixture, join, local_mesh, model_dir, replicated_of, shuffled_of,
};
use semmoe_tables::{Attention, ExpertCopies, RankId};
use semmoe_worker::ep::{ExpertLayout, ExpertPlacement, Lockstep, NodeLayout, StepPhase};
use semmoe_worker::model::{ExpertRoom, KvCache, Model, ModelConfig, StepItem, SwitchOutcome, Wants};

fn whole(copies: impl Into<ExpertCopies>) -> ExpertPlacement {
    ExpertPlacement { layout: ExpertLayout::Ep, replicas: copies.into() }
}

fn slices(copies: impl Into<ExpertCopies>) -> ExpertPlacement {
    ExpertPlacement { layout: ExpertLayout::Tp, replicas: copies.into() }
}

/// Experts on nodes of two ranks.
fn on_nodes(copies: impl Into<ExpertCopies>, world: u16) -> ExpertPlacement {
    ExpertPlacement { layout: ExpertLayout::Hybrid(nodes(world)), replicas: copies.into() }
}

fn nodes(world: u16) -> NodeLayout {
    format!("{}x2", world / 2).parse().unwrap()
}

/// Room for every placement of the schedule.
fn room(config: &ModelConfig, world: u16, layout: ExpertLayout) -> ExpertRoom {
    let slots = Some((config.num_experts / usize::from(world)) as u16 + 2);
    ExpertRoom { slots, hybrid: Some(nodes(world)), ..layout.into() }
}

/// From E to another E, to slices, to nodes, and back; with replicas added and removed.
fn schedule(config: &ModelConfig, world: u16) -> Vec<ExpertPlacement> {
    let contiguous = || ExpertCopies::from(&contiguous_of(config, world));
    let shuffled = |seed| ExpertCopies::from(&shuffled_of(config, world, seed));
    let replicated = |extra, seed| ExpertCopies::from(&replicated_of(config, world, extra, seed));
    vec![
        whole(contiguous()),
        whole(shuffled(1)),
        slices(shuffled(1)),
        whole(shuffled(2)),
        on_nodes(shuffled(2), world),
        whole(replicated(1, 3)),
        whole(replicated(1, 4)),
        on_nodes(replicated(1, 4), world),
        slices(contiguous()),
        slices(shuffled(5)),
        on_nodes(shuffled(5), world),
        on_nodes(shuffled(6), world),
        whole(replicated(2, 6)),
        whole(contiguous()),
    ]
}

/// Logits and routes of one step of one sequence.
type Seen = (Vec<f32>, Vec<u16>);

fn step(model: &mut Model, ep: &mut semmoe_worker::ep::ExpertParallel, kv: &mut KvCache, tokens: &[u32]) -> Seen {
    let phase = if tokens.len() > 1 { StepPhase::Prefill } else { StepPhase::Decode };
    let mut items = [StepItem { kv, tokens, wants: Wants::Logits, phase }];
    let out = model.step(&mut items, ep).unwrap();
    (out.logits(0).unwrap().to_vec(), out.routes(0).to_vec())
}

/// A prompt, and greedy steps after it: one before each switch and one after the last.
fn run_text(prompt: &[u32], steps: usize, mut step: impl FnMut(usize, &[u32]) -> Seen) -> Vec<Seen> {
    let mut seen: Vec<Seen> = Vec::new();
    let mut tokens = prompt.to_vec();
    for at in 0..steps {
        seen.push(step(at, &tokens));
        tokens = vec![argmax(&seen.last().unwrap().0)];
    }
    seen
}

/// One model that switches; ranks of a host of `host` ranks copy from each other's memory.
fn switched(
    dir: &Path,
    link: Box<dyn Lockstep>,
    schedule: &[ExpertPlacement],
    (host, prompt): (usize, &[u32]),
) -> Vec<Seen> {
    let room = room(&ModelConfig::load(dir).unwrap(), link.world() as u16, schedule[0].layout);
    let Rank { rank, mut model, mut ep } = Rank::switchable(dir, link, &schedule[0].replicas, room);
    model.share_experts(&(0..ep.world()).filter(|peer| peer / host == rank / host).collect::<Vec<_>>());
    let mut kv = model.new_sequence();
    run_text(prompt, schedule.len(), |at, tokens| {
        if at > 0 {
            model.check_switch(&schedule[at], &ep).unwrap();
            let outcome = model.switch_experts(&schedule[at], &mut ep, &mut |_| None).unwrap();
            assert_eq!(outcome, SwitchOutcome::Committed);
            assert_eq!(ep.placement(), &schedule[at]);
        }
        step(&mut model, &mut ep, &mut kv, tokens)
    })
}

/// A model loaded for each part of the schedule, all over one link in turn.
fn reloaded(dir: &Path, links: Vec<Box<dyn Lockstep>>, schedule: &[ExpertPlacement], prompt: &[u32]) -> Vec<Seen> {
    let mut kv = None;
    // No rank may leave before all have finished.
    let mut joined = Vec::new();
    let mut links = links.into_iter();
    run_text(prompt, schedule.len(), |at, tokens| {
        let ExpertPlacement { layout, replicas: copies } = &schedule[at];
        let link = links.next().unwrap();
        let (rank, world) = (RankId::new(link.rank() as u16), link.world() as u16);
        let room = ExpertRoom { hybrid: Some(nodes(world)), ..(*layout).into() };
        let mut model = Model::load_divided(dir, rank, copies, room, Attention::Dp).unwrap();
        joined.push(join(link, copies, *layout));
        let kv = kv.get_or_insert_with(|| model.new_sequence());
        step(&mut model, joined.last_mut().unwrap(), kv, tokens)
    })
}

fn on_threads<T: Send, I: Send>(inputs: Vec<I>, work: impl Fn(usize, I) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let start = |(rank, input)| scope.spawn(move || work(rank, input));
        let threads: Vec<_> = inputs.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A different text for each rank, so that their batches differ.
fn prompt(config: &ModelConfig, rank: usize) -> Vec<u32> {
    (0..5 + 7 * rank as u32).map(|at| (at * 31 + 17 * rank as u32) % config.vocab_size as u32).collect()
}

fn check(dir: &Path, world: u16, host: usize) {
    let config = ModelConfig::load(dir).unwrap();
    let schedule = schedule(&config, world);
    let found =
        on_threads(local_mesh(world), |rank, link| switched(dir, link, &schedule, (host, &prompt(&config, rank))));
    let meshes: Vec<Vec<_>> = schedule.iter().map(|_| local_mesh(world)).collect();
    // By rank instead of by part of the schedule.
    let mut links: Vec<Vec<Box<dyn Lockstep>>> = (0..world).map(|_| Vec::new()).collect();
    meshes.into_iter().for_each(|mesh| mesh.into_iter().zip(&mut links).for_each(|(link, of)| of.push(link)));
    let expected = on_threads(links, |rank, links| reloaded(dir, links, &schedule, &prompt(&config, rank)));
    for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
        for (at, ((logits, routes), (expected_logits, expected_routes))) in found.iter().zip(expected).enumerate() {
            assert_eq!(routes, expected_routes, "{}: rank {rank} of {world}, part {at}", dir.display());
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(logits), bits(expected_logits), "{}: rank {rank} of {world}, part {at}", dir.display());
        }
    }
}

#[test]
fn every_family_steps_as_if_it_had_been_loaded_in_its_new_spread() {
    for name in FIXTURES {
        check(&fixture(name), 2, 2);
        check(&fixture(name), 4, 2);
        check(&fixture(name), 2, 1);
    }
}

#[test]
fn the_bundled_model_steps_as_if_it_had_been_loaded_in_its_new_spread() {
    check(&model_dir(), 4, 4);
}

/// An objection at any layer, by any rank, in any direction: the experts are back at their places, and later steps
/// equal those of a unit that never switched.
#[test]
fn an_objection_takes_every_layer_back() {
    let dir = fixture("qwen3-moe");
    let config = ModelConfig::load(&dir).unwrap();
    let schedule = schedule(&config, 2);
    // From slices to slices nothing moves that could be rolled back.
    let moves = schedule.windows(2).filter(|pair| pair.iter().any(|placement| placement.layout != ExpertLayout::Tp));
    for pair in moves {
        let expected = on_threads(local_mesh(2), |rank, link| {
            let room = room(&config, 2, pair[0].layout);
            let Rank { mut model, mut ep, .. } = Rank::with_experts(&dir, link, &pair[0].replicas, room);
            let mut kv = model.new_sequence();
            step(&mut model, &mut ep, &mut kv, &prompt(&config, rank))
        });
        let found = on_threads(local_mesh(2), |rank, link| {
            let room = room(&config, 2, pair[0].layout);
            let Rank { mut model, mut ep, .. } = Rank::switchable(&dir, link, &pair[0].replicas, room);
            model.share_experts(&[0, 1]);
            for objector in 0..2 {
                for at in 0..config.num_moe_layers() {
                    let objects = objector == rank;
                    let mut objection = |layer: semmoe_tables::LayerIdx| {
                        (objects && layer.index() == at).then(|| "it was asked to".to_owned())
                    };
                    let outcome = model.switch_experts(&pair[1], &mut ep, &mut objection).unwrap();
                    let cause = format!("rank {objector} refused layer {at}: a stop was requested");
                    assert_eq!(outcome, SwitchOutcome::RolledBack { cause });
                    assert_eq!(ep.placement(), &pair[0]);
                }
            }
            let mut kv = model.new_sequence();
            step(&mut model, &mut ep, &mut kv, &prompt(&config, rank))
        });
        assert!(found == expected, "{:?} to {:?}", pair[0].layout, pair[1].layout);
    }
}

#[test]
fn a_spread_for_another_unit_or_of_uneven_slices_is_refused() {
    let dir = fixture("qwen3-moe");
    let config = ModelConfig::load(&dir).unwrap();
    let rank = Rank::of(&dir, local_mesh(1).remove(0), &contiguous_of(&config, 1));
    let refused = |placement| rank.model.check_switch(&placement, &rank.ep).unwrap_err().to_string();
    let other = ModelConfig { num_experts: config.num_experts + 1, ..config.clone() };
    assert!(refused(whole(&contiguous_of(&other, 1))).contains("experts per layer"));
    let groups = refused(whole(&contiguous_of(&config, 2)));
    assert!(groups.contains("2 groups"), "{groups}");
    // Copies for tokens of more ranks than there are.
    let mut json = serde_json::to_value(ExpertCopies::from(&contiguous_of(&config, 1))).unwrap();
    let used = json["used"].as_array().unwrap();
    json["used"] = [used.clone(), used.clone()].concat().into();
    let places = refused(whole(serde_json::from_value::<ExpertCopies>(json).unwrap()));
    assert!(places.contains("2 places"), "{places}");
    on_threads(local_mesh(8), |_, link| {
        let placement = slices(&shuffled_of(&config, 8, 1));
        let rank = Rank::of(&dir, link, &shuffled_of(&config, 8, 1));
        let refused = rank.model.check_switch(&placement, &rank.ep).unwrap_err().to_string();
        assert!(refused.contains("width 12") && refused.contains('8'), "{refused}");
        // Ranks without a group in the placement answer as the others do, because only the first answer is reported.
        let refused = rank.model.check_switch(&whole(&shuffled_of(&config, 2, 1)), &rank.ep).unwrap_err();
        assert_eq!(refused.to_string(), "the placement has 2 groups, but the unit has 8");
    });
}
