//! Records that look like those of a sweep, out of a crude model of what strategies cost: for tests of what is made of them.

use std::collections::BTreeMap;

use rig::environment::Environment;
use rig::flag::{Flag, FlagKind};
use rig::link::Pipe;
use rig::record::{Cell, Link, Measured, Operation, Rank, Record, SCHEMA, Status, Steps};
use rig::why::{Connection, Interface, Network};

pub(crate) const STRATEGIES: [&str; 8] = ["single", "ps", "sharded-ps", "ring", "ddp", "zero1", "zero2", "fsdp"];

const STEPS: usize = 12;

/// Bytes of all gradients, and the embedding's share of them.
const GRADIENTS: f64 = 3.2e6;
const EMBEDDING: f64 = 0.2;

/// Name, Mbit/s, milliseconds of a round trip, share of packets that are lost.
const LINKS: [(&str, f64, f64, f64); 4] =
    [("dc", 10_000.0, 0.2, 0.0), ("lan", 1000.0, 0.5, 0.0), ("wan", 200.0, 20.0, 0.0), ("mobile", 50.0, 60.0, 0.01)];

/// Strategies × transports × links × numbers of ranks × rounds, with holes, doubts and runs that go wrong.
pub(crate) fn sweep(transports: &[&str], ranks: &[usize], rounds: u32) -> Vec<Record> {
    let mut records = Vec::new();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for round in 1..=rounds {
        // What drifts between rounds.
        let drift = 1.0 + 0.03 * random.unit();
        for (link, ..) in LINKS {
            for transport in transports {
                for ranks in ranks {
                    for strategy in STRATEGIES {
                        let ranks = if strategy == "single" { 1 } else { *ranks };
                        let cell = cell(strategy, transport, link, ranks);
                        let again = records.iter().any(|record: &Record| record.round == round && record.cell == cell);
                        if !again {
                            let position = records.len() as u64;
                            records.push(record(cell, round, position, drift, &mut random));
                        }
                    }
                }
            }
        }
    }
    spoil(&mut records);
    records
}

pub(crate) fn cell(strategy: &str, transport: &str, link: &str, ranks: usize) -> Cell {
    // As a plan does: what means nothing to a cell has one value.
    let in_memory = strategy == "single" || ["null", "local", "shm", "tcp-ipc"].contains(&transport);
    Cell {
        strategy: strategy.into(),
        transport: if strategy == "single" { "none" } else { transport }.into(),
        link: if in_memory { "loopback" } else { link }.into(),
        ranks,
        lanes: 1,
        congestion: if in_memory { "default" } else { "cubic" }.into(),
        steps: STEPS as u64,
        ..Cell::default()
    }
}

/// Some cells fail, some runs are doubted.
fn spoil(records: &mut [Record]) {
    for record in records {
        let Cell { strategy, transport, link, ranks, .. } = &record.cell;
        let status = match (strategy.as_str(), transport.as_str(), link.as_str(), ranks) {
            ("ps", "quic", "mobile", 4) => Status::TimedOut("no step ended within 120 s; the last was 3 of 12".into()),
            ("fsdp", "quic", "wan", 4) => {
                Status::Failed("rank 2 was lost while gathering <block 3>: idle for 10 s".into())
            }
            ("zero2", "tcp", "lan", 2) if record.round == 2 => Status::Failed("rank 1 ended with signal 9".into()),
            (_, "nccl", ..) => Status::NotAvailable("no GPU here: libcuda.so.1 was not found".into()),
            _ => Status::Ok,
        };
        if *ranks > 2 {
            let what = format!("{ranks} rank(s) of 1 computing thread(s) share 2 cores");
            record.flags.push(Flag { kind: FlagKind::SharedCores, what });
        }
        if record.position.is_multiple_of(17) {
            let what = "other processes took 7.3 % of the processors".into();
            record.flags.push(Flag { kind: FlagKind::MachineBusy, what });
        }
        if strategy == "zero1" && transport == "quic" && link == "lan" && *ranks == 2 && record.round == 1 {
            let what = "rank 0 sent 3 200 004 bytes a step, where the formula says 3 200 000".into();
            record.flags.push(Flag { kind: FlagKind::OffTheFormula, what });
        }
        if status != Status::Ok {
            record.measured = None;
        }
        record.status = status;
    }
}

fn record(cell: Cell, round: u32, position: u64, drift: f64, random: &mut Random) -> Record {
    let measured = measured(&cell, drift, random);
    Record {
        schema: SCHEMA,
        plan: "four-links".into(),
        round,
        position,
        started_unix_s: 1.79e9 + 20.0 * position as f64,
        wall_s: 18.0,
        status: Status::Ok,
        flags: Vec::new(),
        measured: Some(measured),
        environment: Environment::read(),
        cell,
    }
}

/// What a strategy sends a step, of the rank that sends most.
fn payload(cell: &Cell, rank: usize) -> f64 {
    let n = cell.ranks as f64;
    match cell.strategy.as_str() {
        "single" => 0.0,
        "ps" if rank == 0 => (n - 1.0) * GRADIENTS,
        "ps" => GRADIENTS,
        "fsdp" => (3.0 - EMBEDDING) * GRADIENTS * (n - 1.0) / n,
        _ => 2.0 * GRADIENTS * (n - 1.0) / n,
    }
}

/// Milliseconds that a step's communication takes.
fn communication(cell: &Cell) -> f64 {
    let (_, rate, rtt, loss) = LINKS.into_iter().find(|link| link.0 == cell.link).unwrap_or(LINKS[0]);
    let n = cell.ranks as f64;
    let (rate, fixed) = match cell.transport.as_str() {
        "null" | "none" => return 0.0,
        "shm" => (60_000.0, 0.05),
        "quic" => (rate.min(6_000.0), 1.2 * rtt + 1.5),
        "quic-unprotected" => (rate.min(9_000.0), 1.2 * rtt + 1.2),
        "tcp-raw" => (rate.min(16_000.0) / (1.0 + 60.0 * loss), rtt + 0.3),
        _ => (rate.min(12_000.0) / (1.0 + 60.0 * loss), rtt + 0.6),
    };
    let hops = match cell.strategy.as_str() {
        "single" => return 0.0,
        "ring" => 2.0 * (n - 1.0) / 2.0,
        "fsdp" => 6.0,
        "zero1" | "zero2" => 2.5,
        "ps" | "sharded-ps" => 2.0,
        _ => 1.5,
    };
    payload(cell, 0) * 8.0 / rate / 1e3 + hops * fixed
}

fn measured(cell: &Cell, drift: f64, random: &mut Random) -> Measured {
    let n = cell.ranks;
    // Two cores, so that four ranks share them.
    let compute = 160.0 / (n.min(2) as f64) * drift;
    let network = communication(cell);
    let hides = matches!(cell.strategy.as_str(), "ddp" | "zero1" | "zero2" | "fsdp");
    let late = if cell.link == "lan" && cell.strategy == "sharded-ps" && n > 2 { 2 } else { 0 };
    let ranks: Vec<Rank> = (0..n).map(|rank| self::rank(cell, rank, (compute, network, hides, late), random)).collect();
    let mut clock = 0.0;
    let seconds = (0..STEPS).map(|step| {
        clock += ranks.iter().map(|rank| rank.steps.total[step]).fold(0.0, f64::max) / 1e3;
        clock
    });
    let seconds: Vec<f64> = seconds.collect();
    let loss = |step: usize| Some(5.6 * (-(step as f64) / 9.0).exp() + 2.4 + 0.02 * (step * 7 % 5) as f64);
    let (name, rate, rtt, loss_share) = LINKS.into_iter().find(|link| link.0 == cell.link).unwrap_or(LINKS[0]);
    let pipe = |end: usize, direction: &str| Pipe {
        end,
        direction: direction.into(),
        packets: (network * 20.0) as u64,
        bytes: (network * 20e3) as u64,
        lost: (network * 20.0 * loss_share) as u64,
        overflowed: if name == "mobile" { 12 } else { 0 },
        late_p50_us: 40.0,
        late_p99_us: 310.0,
        ..Pipe::default()
    };
    let link = match cell.link.as_str() {
        "loopback" => Link { description: "loopback".into(), ..Link::default() },
        _ => Link {
            description: format!(
                "{name}: {n} network namespaces, emulated through TUN; MTU 1500, up ({rate}mbit, queue 1 MB, delay {} ms, loss {} %), \
                 down ({rate}mbit); TCP congestion control cubic",
                rtt / 2.0,
                loss_share * 100.0
            ),
            emulator: (0..n).flat_map(|end| [pipe(end, "up"), pipe(end, "down")]).collect(),
            probe: None,
        },
    };
    Measured {
        tokens_per_step: 12 * 128,
        parameters: 800_000,
        losses: (0..STEPS).map(loss).collect(),
        seconds,
        grad_norms: Vec::new(),
        weights_hash: format!("{n}-{}", if cell.strategy == "ps" { "f00d" } else { "beef" }),
        ranks,
        transport_facts: vec![("lanes".into(), "1".into())],
        link,
        hosts: Vec::new(),
        trained: None,
    }
}

fn rank(cell: &Cell, rank: usize, model: (f64, f64, bool, usize), random: &mut Random) -> Rank {
    let (compute, network, hides, late) = model;
    let mut steps = Steps::default();
    for step in 0..STEPS {
        let warm = if step == 0 { 1.5 } else { 1.0 };
        let noise = 1.0 + 0.02 * random.unit();
        let compute = compute * warm * noise;
        let network = network * (1.0 + 0.05 * random.unit());
        let hidden = if hides { (0.6 * compute).min(0.8 * network) } else { 0.0 };
        let skew = if late > 0 && rank != late { 60.0 } else { 0.4 * random.unit() };
        let parts = [0.2, compute, 1.1, network - hidden, 0.3, skew, 1.3, 4.2, 0.3 + 0.2 * random.unit()];
        let columns = [
            &mut steps.data,
            &mut steps.compute,
            &mut steps.pack,
            &mut steps.exposed,
            &mut steps.scalars,
            &mut steps.skew,
            &mut steps.unpack,
            &mut steps.optimizer,
            &mut steps.other,
        ];
        columns.into_iter().zip(parts).for_each(|(column, part)| column.push(part));
        steps.total.push(parts.iter().sum());
        steps.communication.push(network);
        steps.hidden.push(hidden);
    }
    let operation = |label: &str, share: f64| Operation {
        label: label.into(),
        communication: network * share,
        exposed: network * share * if hides { 0.4 } else { 1.0 },
        hidden: network * share * if hides { 0.6 } else { 0.0 },
        skew: 0.1,
    };
    let quic = cell.transport.starts_with("quic");
    let connected = quic || cell.transport.starts_with("tcp");
    let (_, _, rtt, loss) = LINKS.into_iter().find(|link| link.0 == cell.link).unwrap_or(LINKS[0]);
    let sent = payload(cell, rank) * STEPS as f64;
    let connection = |peer: usize| Connection {
        protocol: if quic { "quic" } else { "tcp" }.into(),
        peer: format!("10.77.0.{}:4433", peer + 1),
        congestion: if quic { "cubic" } else { "bbr" }.into(),
        rtt_ms: rtt * 1.3 + 0.1,
        min_rtt_ms: Some(rtt + 0.02),
        congestion_window_bytes: 1_200_000,
        bytes_sent: sent as u64,
        packets_sent: (sent / 1400.0) as u64,
        retransmitted_packets: (sent / 1400.0 * loss) as u64,
        retransmitted_bytes: (sent * loss) as u64,
    };
    Rank {
        rank,
        steps,
        operations: vec![
            operation("gradients, bucket 0: head", 0.3),
            operation("gradients, bucket 1: blocks 3 to 0", 0.7),
        ],
        waited_for: (0..cell.ranks)
            .map(|other| if late > 0 && other == late && rank != late { 60.0 } else { 0.1 })
            .collect(),
        payload_bytes: Some(payload(cell, rank) as u64),
        payload_expected: payload(cell, rank) as u64,
        messages: Some(24),
        messages_expected: 24,
        scalar_bytes: Some(64),
        framing_bytes: Some(960),
        peak_rss_bytes: 180_000_000,
        network: Network {
            interface: connected.then_some(Interface { bytes_sent: (sent * 1.06) as u64, ..Interface::default() }),
            connections: if connected {
                (0..cell.ranks).filter(|peer| *peer != rank).map(connection).collect()
            } else {
                Vec::new()
            },
            cpu_s: BTreeMap::from([("training".to_string(), 2.1), ("network".into(), if quic { 0.62 } else { 0.21 })]),
            missing: (!connected).then(|| format!("{} has no connections", cell.transport)),
        },
        staleness: None,
        trained: None,
    }
}

/// Numbers that look random and are always the same.
struct Random(u64);

impl Random {
    /// From −1 to 1.
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}
