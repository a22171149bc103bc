//! The simulation where the result is known: formulas of single operations, and the slips that are known of cost models.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use comm_core::{Algorithm, DType, OpKind};
use predict::alpha_beta::alpha_beta;
use predict::network::{Congestion, Costs, Link, Network, Processors};
use predict::trace::{Collective, Message, RankTrace, Trace, Work};
use predict::{Detail, Outcome, simulate};

const RATE: f64 = 125e6;

/// 1 Gbit/s whose packets are all payload, and nothing else that costs.
fn network() -> Network {
    Network {
        link: Link::even("1 Gbit/s", Some(RATE * 8.0), 0.0),
        costs: Costs { packet_overhead: 0.0, ..Costs::default() },
        processors: Processors::Own { cores: 1.0 },
        threads: 1.0,
    }
}

fn trace(ranks: usize, of_rank: impl Fn(usize, &mut RankTrace)) -> Trace {
    let one = |rank| {
        let mut trace = RankTrace::default();
        of_rank(rank, &mut trace);
        trace
    };
    Trace { name: "test".into(), steps: 1, ranks: (0..ranks).map(one).collect() }
}

fn run(trace: &Trace, network: &Network) -> Outcome {
    simulate(trace, network, Detail::EveryRank).unwrap()
}

fn collective(kind: OpKind, algorithm: Algorithm, count: usize) -> Work {
    Work::Collective(Collective { algorithm: Some(algorithm), ..Collective::of_all(kind, count) })
}

fn message(peer: usize, bytes: u64) -> Message {
    Message { peer, bytes, lane: 0, background: false }
}

/// Headers of messages are the difference.
fn assert_near(found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < 1e-3, "{found} s, not {expected}");
}

fn operation(ranks: usize, work: &Work, network: &Network) -> f64 {
    run(&trace(ranks, |_, rank| _ = rank.push("operation", vec![], work.clone())), network).step_s
}

/// The slip: bytes over rate, without what a ring sends.
#[test]
fn a_ring_sends_twice_all_shards_but_one() {
    let bytes = 8_388_608.0;
    for ranks in [2, 4, 8, 16] {
        let found = operation(ranks, &collective(OpKind::AllReduce, Algorithm::Ring, 1 << 21), &network());
        assert_near(found, 2.0 * (ranks as f64 - 1.0) / ranks as f64 * bytes / RATE);
    }
}

/// The slip: the rate of the unshaped link at every level.
#[test]
fn a_slower_link_takes_longer_in_proportion() {
    let work = collective(OpKind::AllReduce, Algorithm::Ring, 1 << 22);
    let at = |bits: f64| operation(4, &work, &Network { link: Link::even("x", Some(bits), 0.0), ..network() });
    assert_near(at(50e6), 20.0 * at(1e9));
}

/// The slip: a network on which nobody is in anybody's way.
#[test]
fn those_that_send_to_one_share_its_link() {
    let bytes = 12_500_000;
    let star = |workers: usize| {
        let trace = trace(workers + 1, |rank, nodes| match rank {
            0 => (1..=workers).for_each(|from| {
                let work = Work::Receive(Message { lane: from % 8, ..message(from, bytes) });
                nodes.push("gradients", vec![], work);
            }),
            _ => _ = nodes.push("gradients", vec![], Work::Send(Message { lane: rank % 8, ..message(0, bytes) })),
        });
        run(&trace, &network()).step_s
    };
    assert_near(star(1), 0.1);
    assert_near(star(7), 0.7);
}

/// The slip: half of what a message takes, or twice.
#[test]
fn there_and_back_is_twice_one_way() {
    let network = Network {
        link: Link::even("far", None, 0.010),
        costs: Costs { message_s: 5e-5, ..network().costs },
        ..network()
    };
    let there_and_back = trace(2, |rank, nodes| {
        let (send, receive) = (Work::Send(message(1 - rank, 0)), Work::Receive(message(1 - rank, 0)));
        let [first, second] = if rank == 0 { [send, receive] } else { [receive, send] };
        let first = nodes.push("first", vec![], first);
        nodes.push("second", vec![first], second);
    });
    assert_near(run(&there_and_back, &network).step_s, 2.0 * (0.010 + 5e-5));
}

/// The slip: as many times the rate as there are channels.
#[test]
fn lanes_share_a_link() {
    let two = trace(2, |_, nodes| {
        for lane in 0..2 {
            let all_reduce = Collective {
                lane,
                background: true,
                algorithm: Some(Algorithm::Ring),
                ..Collective::of_all(OpKind::AllReduce, 1 << 21)
            };
            nodes.push("bucket", vec![], Work::Collective(all_reduce));
        }
    });
    let one = operation(2, &collective(OpKind::AllReduce, Algorithm::Ring, 1 << 21), &network());
    assert_near(run(&two, &network()).step_s, 2.0 * one);
}

/// The slip: a base latency that is missing.
#[test]
fn what_has_no_bytes_takes_its_rounds() {
    let network = Network { costs: Costs { message_s: 2e-5, ..network().costs }, ..network() };
    for (ranks, rounds) in [(2, 1.0), (3, 2.0), (8, 3.0), (9, 4.0)] {
        let found = operation(ranks, &collective(OpKind::Barrier, Algorithm::Direct, 0), &network);
        assert!(found > rounds * 2e-5 && found < rounds * 2.2e-5, "{ranks} ranks: {found}");
    }
}

/// The slip: a direct exchange that is faster than the ring, since nobody shares anything.
#[test]
fn a_direct_exchange_of_everything_is_slower_than_a_ring() {
    let by = |algorithm| operation(4, &collective(OpKind::AllReduce, algorithm, 1 << 21), &network());
    assert_near(by(Algorithm::Direct), 2.0 * by(Algorithm::Ring));
    assert_near(by(Algorithm::Sharded), by(Algorithm::Ring));
    assert_near(by(Algorithm::HalvingDoubling), by(Algorithm::Ring));
}

/// The slip: overlap as a share that the user supplies. And: an operation that begins before what it needs has been computed.
#[test]
fn an_operation_begins_when_its_gradients_are_there_and_hides_behind_the_rest() {
    let step = |background: bool| {
        trace(2, |_, nodes| {
            let first = nodes.push("backward", vec![], Work::Compute { ns: 50_000_000 });
            let bucket = Collective {
                background,
                algorithm: Some(Algorithm::Ring),
                ..Collective::of_all(OpKind::AllReduce, 3_125_000)
            };
            let bucket = nodes.push("bucket", vec![first], Work::Collective(bucket));
            let after = if background { first } else { bucket };
            let last = nodes.push("backward", vec![after], Work::Compute { ns: 60_000_000 });
            nodes.push("optimizer", vec![last, bucket], Work::Compute { ns: 10_000_000 });
        })
    };
    // 12.5 MB at 125 MB/s.
    let beside = run(&step(true), &network());
    assert_near(beside.step_s, 0.050 + 0.100 + 0.010);
    assert_near(beside.exposed_s(), 0.040);
    assert_near(beside.utilization(), 0.120 / 0.160);
    let after = run(&step(false), &network());
    assert_near(after.step_s, 0.050 + 0.100 + 0.060 + 0.010);
}

/// The slip: messages of a ring that follow one another without waiting. Here a rank waits for each before it sends the next.
#[test]
fn each_round_of_a_ring_waits_for_the_one_before() {
    let delayed = Network { link: Link::even("far", Some(RATE * 8.0), 0.005), ..network() };
    let work = collective(OpKind::AllReduce, Algorithm::Ring, 1 << 21);
    let (near, far) = (operation(2, &work, &network()), operation(2, &work, &delayed));
    // Eight pieces of 512 KiB in each of two steps.
    assert_near(far - near, 16.0 * 0.005);
}

/// Four ranks, each with another peer on each lane: where shares are uneven one direction of an exchange ends late, and nothing of its lane goes meanwhile.
#[test]
fn uneven_shares_cost_those_that_wait_for_both_directions() {
    let of = |unevenness: f64, lanes: usize| {
        let network = Network { costs: Costs { unevenness, ..network().costs }, ..network() };
        let buckets = trace(4, |_, nodes| {
            for bucket in 0..6 {
                let all_reduce = Collective {
                    lane: bucket % lanes,
                    background: true,
                    algorithm: Some(Algorithm::HalvingDoubling),
                    ..Collective::of_all(OpKind::AllReduce, 1 << 20)
                };
                nodes.push("bucket", vec![], Work::Collective(all_reduce));
            }
        });
        run(&buckets, &network).step_s
    };
    let even = of(0.0, 2);
    assert_near(even, of(0.0, 1));
    assert_near(of(0.5, 1), even);
    let uneven = of(0.5, 2);
    assert!(uneven > 1.03 * even && uneven < 1.5 * even, "{uneven}, {even}");
}

#[test]
fn a_connection_begins_slowly_and_again_after_a_pause() {
    let mut network = network();
    network.link = Link::even("far", Some(RATE * 8.0), 0.025);
    let cold = run(&send(1_000_000, 1_000_000_000), &network).step_s - 1.0;
    // Ten packets in the first round trip, and twice as many in each further one.
    let rounds = (1_000_000.0_f64 / 15_000.0 + 1.0).log2().floor();
    assert!(cold > rounds * 0.05 && cold < (rounds + 2.0) * 0.05, "{cold}");
    let warm = run(&send(1_000_000, 1_000_000), &network).step_s - 0.001;
    assert!(warm < cold / 2.0, "{warm}, {cold}");
}

/// One message, and an answer.
fn send(bytes: u64, pause_ns: u64) -> Trace {
    trace(2, |rank, nodes| {
        let paused = nodes.push("pause", vec![], Work::Compute { ns: pause_ns });
        let work = if rank == 0 { Work::Send(message(1, bytes)) } else { Work::Receive(message(0, bytes)) };
        let first = nodes.push("message", vec![paused], work);
        let answer = if rank == 0 { Work::Receive(message(1, 4)) } else { Work::Send(message(0, 4)) };
        nodes.push("answer", vec![first], answer);
    })
}

#[test]
fn a_window_outlasts_a_pause_but_for_the_kernels_by_losses() {
    let of = |congestion: Congestion| {
        let costs = Costs { congestion, ..network().costs };
        let network = Network { link: Link::even("far", Some(RATE * 8.0), 0.025), costs, ..network() };
        run(&send(1_000_000, 1_000_000_000), &network).step_s - 1.0
    };
    let (once, warm) = (1_000_000.0 / RATE + 2.0 * 0.025, of(Congestion::Measured));
    // The window has grown to what the first message took.
    assert!(warm > once && warm < 2.0 * once, "{warm}, {once}");
    assert_near(of(Congestion::LossesWithoutRestart), warm);
    assert!(of(Congestion::Losses) > 2.5 * warm, "{}", of(Congestion::Losses));
}

/// The slip: a rate that is taken from what passed in a burst.
#[test]
fn a_burst_passes_at_once_and_the_rest_at_the_rate() {
    let mut network = network();
    for pipe in [&mut network.link.usual.up, &mut network.link.usual.down] {
        pipe.burst_bytes = 250_000.0;
    }
    let after_a_pause = |bytes: u64| run(&send(bytes, 10_000_000), &network).step_s - 0.010;
    assert!(after_a_pause(200_000) < 1e-5, "{}", after_a_pause(200_000));
    // 2 ms of the rate passed before.
    assert!((after_a_pause(1_250_000) - 0.008).abs() < 1e-5, "{}", after_a_pause(1_250_000));
    // Without a pause all goes at the rate: what one way had saved is spent after the first times.
    let steady = collective(OpKind::AllReduce, Algorithm::Ring, 1 << 21);
    assert!((operation(2, &steady, &network) / (8_388_608.0 / RATE) - 1.0).abs() < 0.04);
}

#[test]
fn a_queue_of_ones_own_card_loses_nothing_and_one_further_on_does() {
    let two = trace(2, |_, nodes| {
        for lane in 0..2 {
            let bucket = Collective { lane, background: true, ..Collective::of_all(OpKind::AllReduce, 1 << 20) };
            nodes.push("bucket", vec![], Work::Collective(bucket));
        }
    });
    let of = |congestion: Congestion, queue: f64, holds_sender: bool| {
        let mut network = network();
        network.link = Link::even("far", Some(RATE * 8.0), 0.010);
        network.costs.congestion = congestion;
        (network.link.usual.up.queue_bytes, network.link.usual.up.holds_sender) = (Some(queue), holds_sender);
        run(&two, &network).step_s
    };
    let path = 0.020 * RATE;
    let free = of(Congestion::Measured, path, true);
    // Two connections of BBR are more than a queue of one round trip takes.
    let lost = of(Congestion::Measured, path, false);
    assert!(lost > free + 0.030, "{lost}, {free}");
    assert_near(of(Congestion::Measured, 4.0 * path, false), free);
    assert_near(of(Congestion::Losses, 1e4, true), of(Congestion::Losses, 1e9, false));
}

#[test]
fn losses_hold_a_connection_back_and_a_rate_does_not_help() {
    let mut network = network();
    network.link = Link::even("lossy", Some(1e8), 0.025);
    network.link.usual.up.loss = 0.005;
    let work = collective(OpKind::AllReduce, Algorithm::Ring, 1 << 20);
    let slow = operation(2, &work, &network);
    network.link.usual.up.bits_per_s = Some(1e10);
    network.link.usual.down.bits_per_s = Some(1e10);
    assert!(operation(2, &work, &network) > 0.8 * slow);
    network.link.usual.up.loss = 0.0;
    assert!(operation(2, &work, &network) < slow / 5.0);
}

#[test]
fn many_answers_at_once_overflow_a_short_queue() {
    let gather = |queue: Option<f64>| {
        let mut network = network();
        network.link.usual.down.queue_bytes = queue;
        let trace = trace(64, |_, nodes| {
            let gathered = nodes.push("gather", vec![], collective(OpKind::Gather, Algorithm::Direct, 1 << 18));
            nodes.push("barrier", vec![gathered], collective(OpKind::Barrier, Algorithm::Direct, 0));
        });
        run(&trace, &network).step_s
    };
    assert!(gather(Some(64e3)) > 0.2 && gather(Some(64e6)) < 0.05 && gather(None) < 0.05);
}

#[test]
fn ranks_that_share_cores_compute_in_turn() {
    let compute = |ranks: usize, cores: f64| {
        let network = Network { processors: Processors::Shared { cores }, ..network() };
        run(&trace(ranks, |_, nodes| _ = nodes.push("compute", vec![], Work::Compute { ns: 100_000_000 })), &network)
            .step_s
    };
    assert_near(compute(2, 2.0), 0.1);
    assert_near(compute(4, 2.0), 0.2);
    assert_near(compute(2, 1.5), 0.1 * 2.0 / 1.5);
    assert_near(compute(1, 1.5), 0.1);
}

#[test]
fn what_a_byte_costs_the_processor_is_taken_from_computation() {
    let costs = Costs { send_s_per_byte: 1e-9, receive_s_per_byte: 1e-9, ..network().costs };
    let processors = Processors::Shared { cores: 1.0 };
    let network = Network { link: Link::even("loopback", None, 0.0), costs, processors, ..network() };
    let both = trace(2, |_, nodes| {
        let bucket = Collective { background: true, ..Collective::of_all(OpKind::AllReduce, 1 << 20) };
        nodes.push("bucket", vec![], Work::Collective(bucket));
        nodes.push("compute", vec![], Work::Compute { ns: 50_000_000 });
    });
    // Each byte of both ranks' 4 MiB takes a nanosecond twice.
    assert_near(run(&both, &network).step_s, 0.1 + 2.0 * 2.0 * 4_194_304.0 * 1e-9);
}

/// Two threads on two cores: one of them has its core for itself, and the other one shares it with all communication.
#[test]
fn communication_falls_to_one_core_where_each_has_a_thread() {
    let costs = Costs { send_s_per_byte: 1e-9, receive_s_per_byte: 1e-9, ..network().costs };
    let of = |cores: f64| {
        let processors = Processors::Shared { cores };
        let network = Network { costs, processors, ..network() };
        let both = trace(2, |_, nodes| {
            let bucket = Collective { background: true, ..Collective::of_all(OpKind::AllReduce, 1 << 20) };
            nodes.push("bucket", vec![], Work::Collective(bucket));
            nodes.push("compute", vec![], Work::Compute { ns: 50_000_000 });
            nodes.push("barrier", vec![0, 1], collective(OpKind::Barrier, Algorithm::Direct, 0));
        });
        run(&both, &network).step_s
    };
    // Each byte of both ranks' 4 MiB takes a nanosecond twice, which is half a core at the link's rate.
    assert_near(of(2.0), 0.050 + 2.0 * 2.0 * 4_194_304.0 * 1e-9);
    assert_near(of(4.0), 0.050);
}

#[test]
fn a_message_waits_for_a_turn_where_every_core_computes() {
    let costs = Costs { turn_s: 2e-3, ..network().costs };
    let of = |ranks: usize, cores: f64| {
        let network = Network { costs, processors: Processors::Shared { cores }, ..network() };
        let all = trace(ranks, |_, nodes| {
            let sum = Collective { background: true, ..Collective::of_all(OpKind::AllReduce, 1) };
            let summed = nodes.push("sum", vec![], Work::Collective(sum));
            nodes.push("compute", vec![], Work::Compute { ns: 50_000_000 });
            let after = Collective { lane: 1, background: true, ..Collective::of_all(OpKind::AllReduce, 1) };
            nodes.push("sum", vec![summed], Work::Collective(after));
        });
        let outcome = run(&all, &network);
        outcome.ranks[0].communicating_s
    };
    // One round each among two, two rounds among four.
    assert!((of(2, 2.0) - 2.0 * 2e-3).abs() < 1e-4, "{}", of(2, 2.0));
    assert!((of(4, 2.0) - 4.0 * 2.0 * 2e-3).abs() < 1e-4, "{}", of(4, 2.0));
    assert!(of(2, 4.0) < 1e-4);
}

/// A step of each shape of strategy.
fn steps(ranks: usize) -> Vec<(&'static str, Trace)> {
    let all = |kind: OpKind, dtype: DType, count: usize| {
        trace(ranks, |_, nodes| {
            let computed = nodes.push("backward", vec![], Work::Compute { ns: 3_000_000 });
            let mut after = vec![computed];
            for lane in 0..2 {
                let bucket = Collective { dtype, lane, background: true, ..Collective::of_all(kind, count) };
                after.push(nodes.push("bucket", vec![computed], Work::Collective(bucket)));
            }
            nodes.push("optimizer", after, Work::Compute { ns: 1_000_000 });
            nodes.push("loss", vec![3], Work::Collective(Collective::of_all(OpKind::AllReduce, 6)));
        })
    };
    let everyone_serves = trace(ranks, |rank, nodes| {
        let computed = nodes.push("backward", vec![], Work::Compute { ns: 3_000_000 });
        let others = || (1..ranks).map(|distance| ((rank + distance) % ranks, (rank + ranks - distance) % ranks));
        for (to, from) in others() {
            nodes.push("shard", vec![computed], Work::Send(message(to, 40_000)));
            nodes.push("shard", vec![computed], Work::Receive(message(from, 40_000)));
        }
    });
    vec![
        ("ring", all(OpKind::AllReduce, DType::F32, 64 * 50_000)),
        ("halving and doubling", all(OpKind::AllReduce, DType::F32, 64 * 4_000)),
        ("recursive doubling", all(OpKind::AllReduce, DType::F32, 64 * 64)),
        ("sharded", all(OpKind::AllReduce, DType::Bf16, 64 * 4_000)),
        ("reduce-scatter", all(OpKind::ReduceScatter, DType::F32, 64 * 4_000)),
        ("all-gather", all(OpKind::AllGather, DType::F32, 64 * 4_000)),
        ("everyone serves", everyone_serves),
    ]
}

fn with_all_costs() -> Network {
    let costs = Costs {
        message_s: 3e-5,
        send_s_per_byte: 2e-10,
        receive_s_per_byte: 3e-10,
        reduce_s_per_byte: 1e-10,
        ..Costs::default()
    };
    Network {
        costs,
        link: Link::even("lan", Some(1e9), 1e-4),
        processors: Processors::Own { cores: 2.0 },
        threads: 1.0,
    }
}

#[test]
fn one_rank_for_all_is_what_every_rank_would_be() {
    for (name, trace) in steps(64) {
        let network = with_all_costs();
        let full = simulate(&trace, &network, Detail::EveryRank).unwrap();
        let collapsed = simulate(&trace, &network, Detail::Classes).unwrap();
        assert_eq!((full.classes, collapsed.classes), (64, 1), "{name}");
        assert!(
            (collapsed.step_s / full.step_s - 1.0).abs() < 1e-6,
            "{name}: {} and {}",
            collapsed.step_s,
            full.step_s
        );
        assert!((collapsed.sent_bytes() / full.sent_bytes() - 1.0).abs() < 1e-6, "{name}");
        assert!((collapsed.exposed_s() / full.exposed_s() - 1.0).abs() < 1e-6, "{name}");
    }
}

/// A server's messages with its workers come one after the other, in a class all at once: the sum is the same, their order is not.
fn star(ranks: usize) -> Trace {
    trace(ranks, |rank, nodes| {
        let bytes = 100_000;
        let computed = nodes.push("backward", vec![], Work::Compute { ns: 2_000_000 });
        if rank == 0 {
            let came: Vec<usize> = (1..ranks)
                .map(|from| nodes.push("gradients", vec![computed], Work::Receive(message(from, bytes))))
                .collect();
            let updated = nodes.push("optimizer", came, Work::Compute { ns: 1_000_000 });
            for to in 1..ranks {
                nodes.push("parameters", vec![updated], Work::Send(message(to, bytes)));
            }
        } else {
            let sent = nodes.push("gradients", vec![computed], Work::Send(message(0, bytes)));
            nodes.push("parameters", vec![sent], Work::Receive(message(0, bytes)));
        }
        let last = nodes.nodes.len() - 1;
        nodes.push("loss", vec![last], Work::Collective(Collective::of_all(OpKind::AllReduce, 3)));
    })
}

#[test]
fn a_server_and_its_workers_are_two_classes() {
    let network = with_all_costs();
    let full = simulate(&star(64), &network, Detail::EveryRank).unwrap();
    let collapsed = simulate(&star(64), &network, Detail::Classes).unwrap();
    assert_eq!(collapsed.classes, 2);
    assert!((collapsed.step_s / full.step_s - 1.0).abs() < 0.02, "{} and {}", collapsed.step_s, full.step_s);
    assert!((collapsed.sent_bytes() / full.sent_bytes() - 1.0).abs() < 1e-6);
}

#[test]
fn thousands_of_ranks_are_a_few() {
    let network = with_all_costs();
    let mut last = 0.0;
    for ranks in [64, 512, 4096] {
        let ring = trace(ranks, |_, nodes| {
            let computed = nodes.push("backward", vec![], Work::Compute { ns: 3_000_000 });
            let bucket = Collective { background: true, ..Collective::of_all(OpKind::AllReduce, 8 << 20) };
            nodes.push("bucket", vec![computed], Work::Collective(bucket));
        });
        let outcome = simulate(&ring, &network, Detail::Auto).unwrap();
        assert_eq!((outcome.classes, outcome.ranks[0].members), (1, ranks));
        assert!(outcome.step_s > last);
        last = outcome.step_s;
    }
    assert_eq!(simulate(&star(4096), &network, Detail::Auto).unwrap().classes, 2);
}

#[test]
fn what_cannot_end_is_said() {
    let waits = trace(2, |rank, nodes| _ = nodes.push("x", vec![], Work::Receive(message(1 - rank, 4))));
    let why = simulate(&waits, &network(), Detail::EveryRank).unwrap_err();
    assert!(why.contains("wait for each other forever: rank 0 at its node 0"), "{why}");
    let uneven = trace(600, |rank, nodes| _ = nodes.push("x", vec![], Work::Compute { ns: rank as u64 / 2 }));
    assert!(simulate(&uneven, &network(), Detail::Auto).is_ok(), "nothing has to match");
    // Each rank has another part in a broadcast.
    let broadcast = |ranks| {
        let work = Work::Collective(Collective::of_all(OpKind::Broadcast, 10));
        trace(ranks, |_, nodes| _ = nodes.push("x", vec![], work.clone()))
    };
    assert!(simulate(&broadcast(500), &network(), Detail::Auto).is_ok());
    assert!(simulate(&broadcast(600), &network(), Detail::Auto).unwrap_err().contains("more than 512 ranks"));
}

#[test]
fn the_plain_model_knows_of_no_one_else() {
    let network = Network { costs: Costs { message_s: 1e-3, ..network().costs }, ..network() };
    let work = collective(OpKind::AllReduce, Algorithm::HalvingDoubling, 3_125_000);
    let trace = trace(4, |_, nodes| {
        let computed = nodes.push("compute", vec![], Work::Compute { ns: 10_000_000 });
        nodes.push("bucket", vec![computed], work.clone());
    });
    assert_near(alpha_beta(&trace, &network).unwrap(), 0.010 + 4.0 * 1e-3 + 1.5 * 12_500_000.0 / RATE);
}

/// Ranks that differ by a nanosecond are as many classes as ranks.
#[test]
fn many_ranks_that_differ_are_refused() {
    let of_rank = |rank: usize, trace: &mut RankTrace| {
        let computed = trace.push("backward", vec![], Work::Compute { ns: 1_000_000 + rank as u64 });
        trace.push("sum", vec![computed], collective(OpKind::AllReduce, Algorithm::Ring, 1000));
    };
    for detail in [Detail::Auto, Detail::Classes, Detail::EveryRank] {
        let why = simulate(&trace(600, of_rank), &network(), detail).unwrap_err();
        assert!(why.contains("more than 512 ranks"), "{detail:?}: {why}");
    }
}
