//! A sweep on the ranks of a job that a launcher has started: every process has read the plan and runs its own rank of each cell; rank 0 decides
//! which cell is next, and has the results.

use std::process::ExitCode;

use comm_core::job::{EXIT_ECHO, Job};
use gpt2::strategy::StrategyKind;
use isocomm::{Rung, TransportKind};
use rig::BenchError;
use rig::launched::Machine;
use rig::record::{Cell, LOOPBACK, NETWORK, Record};
use rig::signal::Signals;
use rig::training::{LaunchedRanks, TextSource};

use super::{order, source};
use crate::plan::Plan;

/// Meets the other ranks, which must have the same plan and program.
///
/// # Errors
/// They do not come, or have others.
pub(super) fn meet(job: Job, plan: &Plan, text: &str) -> Result<LaunchedRanks, BenchError> {
    let agreement = [
        ("program", format!("bench {}", env!("CARGO_PKG_VERSION"))),
        ("build", if cfg!(debug_assertions) { "debug" } else { "release" }.into()),
        ("plan", format!("{}, {:016x}", plan.name, order::seed(text))),
    ];
    Ok(LaunchedRanks::meet(job, &agreement, plan.timeout)?)
}

/// The process of a rank other than 0, to its end.
///
/// # Errors
/// Those of the control plane, and an end by a signal.
pub(super) fn serve(
    ranks: &LaunchedRanks,
    plan: &Plan,
    data: Option<std::path::PathBuf>,
) -> Result<ExitCode, BenchError> {
    let signals = Signals::catch()?;
    let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"));
    let text = match &folder {
        Ok(folder) => source(plan, data, folder.path()),
        Err(why) => Err(why.clone().into()),
    };
    // Rank 0 says what is wrong.
    if agree(ranks, &told(text.as_ref()))?.is_err() {
        return Ok(echo());
    }
    ranks.serve(&text?, &signals)?;
    Ok(ExitCode::SUCCESS)
}

/// What a rank tells of its text: it may have another path on each machine.
pub(super) fn told(text: Result<&TextSource, &BenchError>) -> Result<String, String> {
    let described = |text: &TextSource| match &text.source {
        Some(path) => text.description.replacen(&path.display().to_string(), "--data", 1),
        None => text.description.clone(),
    };
    text.map(described).map_err(ToString::to_string)
}

/// Whether all ranks are ready, and have the same text as rank 0. All ranks call it together.
///
/// # Errors
/// Those of the control plane.
pub(super) fn agree(ranks: &LaunchedRanks, mine: &Result<String, String>) -> Result<Result<(), String>, BenchError> {
    let all = ranks.gather("texts", mine)?;
    let mut texts = Vec::with_capacity(all.len());
    for (rank, told) in all.into_iter().enumerate() {
        match told {
            Ok(text) => texts.push(text),
            Err(why) if rank == 0 => return Ok(Err(why)),
            Err(why) => return Ok(Err(format!("rank {rank}: {why}"))),
        }
    }
    let other = texts.iter().enumerate().find(|(_, text)| Some(*text) != texts.first());
    Ok(other.map_or(Ok(()), |(rank, text)| {
        Err(format!(
            "rank {rank} has another text ({text}) than rank 0 ({}): --data must name the same text on all machines",
            texts.first().map_or("", String::as_str)
        ))
    }))
}

fn echo() -> ExitCode {
    u8::try_from(EXIT_ECHO).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Why the ranks cannot run a cell, if so.
pub(super) fn left_out(cell: &Cell, ranks: usize, machines: &[Machine]) -> Option<String> {
    if cell.ranks != ranks {
        return Some(format!("the launcher has started {ranks} ranks, and the cell has another number"));
    }
    if cell.link != LOOPBACK && cell.link != NETWORK {
        return Some(
            "emulated links exist on one machine only, and the ranks of a launcher use the machines' own network"
                .into(),
        );
    }
    if cell.program.is_pytorch() {
        return Some("PyTorch's ranks can only be started by this program, without a launcher".into());
    }
    if let Some(why) = divided(cell, machines) {
        return Some(why);
    }
    let rung = cell.transport.parse::<Rung>().ok()?;
    if rung.is_threads() {
        return Some(format!("{rung} connects threads of one process, and the ranks of a launcher are processes"));
    }
    let crosses = |kind: TransportKind| kind.medium().crosses_hosts();
    let stays = machines.len() > 1 && !rung.is_timing_only() && !crosses(rung.transport());
    stays.then(|| format!("{rung} connects ranks of one machine, and these are on {}", machines.len()))
}

/// Why the ranks of the cell's nodes are not where it has them, if so: a node is never of several machines.
fn divided(cell: &Cell, machines: &[Machine]) -> Option<String> {
    let has_nodes = cell.strategy.parse::<StrategyKind>().is_ok_and(|kind| kind.spec().tells_nodes_apart);
    let size = cell.ranks_per_node().max(1);
    let machine = |rank: usize| machines.iter().position(|machine| machine.ranks.contains(&rank));
    let is_divided = has_nodes && (0..cell.ranks).any(|rank| machine(rank) != machine(rank / size * size));
    is_divided.then(|| {
        format!(
            "{} has nodes of {size} ranks here, and the launcher has put the ranks of a node on several machines",
            cell.strategy
        )
    })
}

/// A warning where ranks were on other machines in the earlier part of a sweep, whose records these are; by the machines' names.
pub(super) fn tell_moved(records: &[Record], now: &[Machine]) -> Option<String> {
    let hosts = |record: &Record| record.measured.as_ref().map(|measured| measured.hosts.clone());
    let before = records.iter().rev().filter_map(hosts).find(|hosts| !hosts.is_empty())?;
    let before: Vec<&str> = before.iter().map(|host| host.name.as_str()).collect();
    let now: Vec<&str> = now.iter().map(|machine| machine.name.as_str()).collect();
    (before != now).then(|| {
        format!(
            "WARNING: the ranks are on other machines ({}) than in the earlier part of this sweep ({}); its rounds cannot be compared with the \
             new ones",
            now.join(", "),
            before.join(", ")
        )
    })
}

/// What is left out of a plan, for people: how many cells for which reason; nothing where all cells can run.
pub(super) fn tell_left_out(cells: &[Cell], ranks: &LaunchedRanks) -> Option<String> {
    let mut reasons: Vec<(String, usize)> = Vec::new();
    for why in cells.iter().filter_map(|cell| left_out(cell, ranks.world_size(), ranks.machines())) {
        match reasons.iter_mut().find(|(known, _)| *known == why) {
            Some((_, count)) => *count += 1,
            None => reasons.push((why, 1)),
        }
    }
    let told: Vec<String> = reasons.iter().map(|(why, count)| format!("{count} ({why})")).collect();
    (!told.is_empty()).then(|| format!("of {} cells left out: {}", cells.len(), told.join("; ")))
}

#[cfg(test)]
mod tests {
    use rig::environment::Environment;
    use rig::record::{Host, Measured, Status};

    use super::*;

    fn machines(placed: &[&[usize]]) -> Vec<Machine> {
        let machine = |ranks: &&[usize]| Machine {
            name: format!("of rank {}", ranks[0]),
            ranks: ranks.to_vec(),
            processes: Vec::new(),
            cores: 2,
        };
        placed.iter().map(machine).collect()
    }

    #[test]
    fn strategies_with_nodes_run_where_each_node_is_of_one_machine() {
        let why = |strategy: &str, placed: &[&[usize]]| {
            let ranks = placed.iter().map(|ranks| ranks.len()).sum();
            let cell = Cell {
                strategy: strategy.into(),
                transport: "tcp".into(),
                link: NETWORK.into(),
                ranks,
                ..Cell::default()
            };
            left_out(&cell, ranks, &machines(placed))
        };
        for strategy in ["hierarchical", "hsdp"] {
            assert_eq!(why(strategy, &[&[0, 1], &[2, 3]]), None);
            assert_eq!(why(strategy, &[&[0, 1, 2, 3]]), None);
            for placed in [&[&[0][..], &[1], &[2], &[3]][..], &[&[0, 2], &[1, 3]], &[&[0, 1, 2], &[3]]] {
                assert!(why(strategy, placed).unwrap().contains("nodes of 2 ranks"), "{strategy} on {placed:?}");
            }
        }
        assert!(why("hsdp", &[&[0], &[1]]).unwrap().contains("nodes of 2 ranks"));
        assert_eq!(why("ddp", &[&[0, 2], &[1, 3]]), None);
    }

    #[test]
    fn other_machines_than_before_are_told_of() {
        let record = |names: &[&str]| {
            let host = |name: &&str| Host { name: (*name).into(), ..Host::default() };
            let measured = Measured { hosts: names.iter().map(host).collect(), ..Measured::default() };
            Record {
                schema: 1,
                plan: "x".into(),
                cell: Cell::default(),
                round: 1,
                position: 0,
                started_unix_s: 0.0,
                wall_s: 0.0,
                status: Status::Ok,
                flags: Vec::new(),
                measured: Some(measured),
                environment: Environment::read(),
            }
        };
        let now = machines(&[&[0, 1], &[2, 3]]);
        let told = |names: &[&[&str]]| {
            let records: Vec<Record> = names.iter().map(|names| record(names)).collect();
            tell_moved(&records, &now)
        };
        let here = ["of rank 0", "of rank 2"];
        assert_eq!((told(&[]), told(&[&[]]), told(&[&["x", "y"], &here, &[]])), (None, None, None));
        let warning = told(&[&here, &["of rank 0", "y"]]).unwrap();
        assert!(warning.contains("(of rank 0, of rank 2)") && warning.contains("(of rank 0, y)"), "{warning}");
    }

    #[test]
    fn cells_that_a_launchers_ranks_cannot_run_are_left_out_with_the_reason() {
        let text = "name = \"x\"\nrounds = 1\n[axes]\nstrategy = \"ddp\"\ntransport = [\"null\", \"local\", \"shm\", \"tcp\", \"quic\"]\n\
                    link = [\"loopback\", \"wan\"]\nranks = [2, 4]";
        let mut plan = Plan::parse(text).unwrap();
        let runs = |plan: &Plan, placed: &[&[usize]]| -> Vec<String> {
            let cells = plan.cells.iter().filter(|cell| left_out(cell, 2, &machines(placed)).is_none());
            cells.map(|cell| format!("{} {}", cell.transport, cell.link)).collect()
        };
        assert_eq!(runs(&plan, &[&[0, 1]]), ["null loopback", "shm loopback", "tcp loopback", "quic loopback"]);
        plan.over_network();
        assert_eq!(runs(&plan, &[&[0], &[1]]), ["null loopback", "tcp network", "quic network"]);
        let why = |transport: &str, link: &str, ranks| {
            let cell = |cell: &&Cell| cell.transport == transport && cell.link == link && cell.ranks == ranks;
            left_out(plan.cells.iter().find(cell).unwrap(), 2, &machines(&[&[0], &[1]])).unwrap()
        };
        assert!(why("tcp", "network", 4).contains("has started 2 ranks, and the cell has another number"));
        assert!(why("tcp", "wan", 2).contains("emulated link"));
        assert!(why("shm", "loopback", 2).contains("shm connects ranks of one machine, and these are on 2"));
        assert!(why("local", "loopback", 2).contains("threads"));
    }
}
