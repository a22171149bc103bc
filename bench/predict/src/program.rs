//! A trace made ready for simulation: what each rank does, or what each class of ranks that all do the same does.

use std::collections::HashMap;
use std::rc::Rc;

use comm_core::table::Table;
use comm_core::{HEADER_LEN, OpKind};

use crate::network::Link;
use crate::schedule::{self, Part};
use crate::trace::{Collective, Message, RankTrace, Trace, Work};

/// What the ranks of a class do, each by itself.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// The ranks; the first stands for all.
    pub(crate) members: Vec<usize>,
    /// Each comes after what it waits for.
    pub(crate) items: Vec<Item>,
}

#[derive(Clone, Debug)]
pub(crate) struct Item {
    /// Places of what must have ended before.
    pub(crate) after: Vec<usize>,
    pub(crate) work: ItemWork,
}

#[derive(Clone, Debug)]
pub(crate) enum ItemWork {
    /// Seconds.
    Compute(f64),
    Exchange {
        lane: usize,
        /// Among operations that all ranks call: begins when all classes have called it.
        together: Option<usize>,
        rounds: Rc<[ClassRound]>,
    },
}

/// What a rank exchanges at a time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClassRound {
    pub(crate) sends: Vec<ClassPart>,
    pub(crate) receives: Vec<ClassPart>,
}

/// Messages between a rank and ranks of a class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ClassPart {
    pub(crate) class: usize,
    /// How many, of one rank.
    pub(crate) count: usize,
    /// Of each, with its header.
    pub(crate) bytes: f64,
    pub(crate) reduces: bool,
}

/// Ranks beyond which not each is simulated by itself.
pub(crate) const MOST_SINGLE_RANKS: usize = 512;

/// Rounds of all different operations together, beyond which memory would be needed without end.
const MOST_ROUNDS: usize = 1 << 22;

/// One program for each rank.
///
/// # Errors
/// An operation that cannot run, with the rank, or there are more than [`MOST_SINGLE_RANKS`].
pub(crate) fn single(trace: &Trace, table: &Table) -> Result<Vec<Program>, String> {
    if trace.ranks.len() > MOST_SINGLE_RANKS {
        return Err(too_many());
    }
    let classes = (0..trace.ranks.len()).map(|rank| vec![rank]).collect();
    build(trace, table, classes)
}

/// One program for each class of ranks that do the same.
///
/// # Errors
/// Ranks do not fall into few classes whose messages match, or an operation cannot run.
pub(crate) fn collapsed(trace: &Trace, link: &Link, table: &Table) -> Result<Vec<Program>, String> {
    let classes = classes(trace, link).ok_or_else(too_many)?;
    let programs = build(trace, table, classes)?;
    check_messages(&programs)?;
    Ok(programs)
}

fn too_many() -> String {
    format!(
        "the ranks cannot be grouped into classes that do the same work, which is needed for more than {MOST_SINGLE_RANKS} ranks; give fewer ranks"
    )
}

/// Ranks that do the same, whoever their peers are, over the same pipes; none where there are more than [`MOST_SINGLE_RANKS`] classes.
fn classes(trace: &Trace, link: &Link) -> Option<Vec<Vec<usize>>> {
    let mut classes: Vec<Vec<usize>> = Vec::new();
    for rank in 0..trace.ranks.len() {
        let like = |class: &Vec<usize>| {
            link.pipes(class[0]) == link.pipes(rank) && alike(&trace.ranks[class[0]], &trace.ranks[rank])
        };
        match classes.iter().position(like) {
            Some(class) => classes[class].push(rank),
            None if classes.len() == MOST_SINGLE_RANKS => return None,
            None => classes.push(vec![rank]),
        }
    }
    Some(classes)
}

fn alike(one: &RankTrace, other: &RankTrace) -> bool {
    let near = |a: u64, b: u64| a.abs_diff(b) <= 64 + a.max(b) / 100;
    let same = |a: &Work, b: &Work| match (a, b) {
        (Work::Compute { ns: a }, Work::Compute { ns: b }) => a == b,
        (Work::Send(a), Work::Send(b)) | (Work::Receive(a), Work::Receive(b)) => {
            a.lane == b.lane && near(a.bytes, b.bytes)
        }
        (Work::Collective(a), Work::Collective(b)) => {
            let rooted = |of: &Collective| has_root(of.kind);
            let plain = |of: &Collective| Collective { group: Vec::new(), root: 0, ..of.clone() };
            plain(a) == plain(b) && a.group.len() == b.group.len() && !rooted(a)
        }
        _ => false,
    };
    let pairs = || one.nodes.iter().zip(&other.nodes);
    one.nodes.len() == other.nodes.len() && pairs().all(|(a, b)| a.after == b.after && same(&a.work, &b.work))
}

fn has_root(kind: OpKind) -> bool {
    matches!(kind, OpKind::Broadcast | OpKind::Reduce | OpKind::Scatter | OpKind::Gather)
}

fn build(trace: &Trace, table: &Table, classes: Vec<Vec<usize>>) -> Result<Vec<Program>, String> {
    let ranks = trace.ranks.len();
    let mut class_of = vec![0; ranks];
    for (number, class) in classes.iter().enumerate() {
        class.iter().for_each(|rank| class_of[*rank] = number);
    }
    let is_single = classes.len() == ranks;
    let mut builder = Builder { ranks, table, class_of: &class_of, is_single, known: HashMap::new(), kept: 0 };
    let mut programs = Vec::with_capacity(classes.len());
    for members in &classes {
        let rank = members[0];
        let nodes = builder.program(rank, &trace.ranks[rank]).map_err(|why| format!("rank {rank}: {why}"))?;
        programs.push(Program { members: members.clone(), items: nodes });
    }
    if !is_single {
        let sizes: Vec<usize> = classes.iter().map(Vec::len).collect();
        for (program, class) in programs.iter_mut().zip(&classes) {
            if class.len() == 1 {
                join_messages(program, &trace.ranks[class[0]], &class_of, &sizes);
            }
        }
    }
    Ok(programs)
}

/// A collective as the ranks' part in it depends on it: who takes part, and which of them this is.
type Key = (Collective, usize);

struct Builder<'a> {
    ranks: usize,
    table: &'a Table,
    class_of: &'a [usize],
    is_single: bool,
    /// Rounds of equal operations are kept once.
    known: HashMap<String, Rc<[ClassRound]>>,
    /// Of all that are known.
    kept: usize,
}

impl Builder<'_> {
    fn program(&mut self, rank: usize, of_rank: &RankTrace) -> Result<Vec<Item>, String> {
        let mut items = Vec::with_capacity(of_rank.nodes.len());
        // Operations of a lane follow one another.
        let mut last: HashMap<(usize, u8), usize> = HashMap::new();
        let mut called = 0;
        for (index, node) in of_rank.nodes.iter().enumerate() {
            let mut after = node.after.clone();
            let kind = match &node.work {
                Work::Compute { .. } | Work::Collective(_) => 0,
                Work::Send(_) => 1,
                Work::Receive(_) => 2,
            };
            if let Some(lane) = node.work.lane()
                && let Some(before) = last.insert((lane, kind), index)
                && !after.contains(&before)
            {
                after.push(before);
            }
            let work = match &node.work {
                Work::Compute { ns } => ItemWork::Compute(*ns as f64 / 1e9),
                Work::Send(message) => self.message(message, true),
                Work::Receive(message) => self.message(message, false),
                Work::Collective(collective) => {
                    let of_all = collective.group.is_empty() && !has_root(collective.kind) && !self.is_single;
                    let spans = of_all && self.class_of.iter().any(|class| *class != self.class_of[rank]);
                    called += usize::from(spans);
                    let rounds = self.rounds((collective.clone(), rank), spans)?;
                    ItemWork::Exchange { lane: collective.lane, together: spans.then_some(called), rounds }
                }
            };
            items.push(Item { after, work });
        }
        Ok(items)
    }

    fn message(&self, message: &Message, sends: bool) -> ItemWork {
        let part = ClassPart {
            class: self.class_of[message.peer],
            count: 1,
            bytes: with_header(message.bytes),
            reduces: false,
        };
        let (sends, receives) = if sends { (vec![part], vec![]) } else { (vec![], vec![part]) };
        ItemWork::Exchange { lane: message.lane, together: None, rounds: Rc::new([ClassRound { sends, receives }]) }
    }

    /// The rounds of a collective; with ranks of all classes alike where it `spans` them.
    fn rounds(&mut self, (collective, rank): Key, spans: bool) -> Result<Rc<[ClassRound]>, String> {
        let key = format!("{collective:?} {rank} {spans}");
        if let Some(known) = self.known.get(&key) {
            return Ok(known.clone());
        }
        let group = &collective.group;
        let members = if group.is_empty() { self.ranks } else { group.len() };
        let own = if group.is_empty() { rank } else { group.iter().position(|each| *each == rank).unwrap_or(0) };
        let class = |part: &Part| {
            let peer = if group.is_empty() { part.peer } else { group[part.peer] };
            self.class_of[if spans { rank } else { peer }]
        };
        let join = |parts: Vec<Part>| {
            let mut joined: Vec<ClassPart> = Vec::new();
            for part in parts {
                let (class, bytes, reduces) = (class(&part), with_header(part.bytes), part.reduces);
                match joined.last_mut().filter(|last| !self.is_single && last.class == class && last.reduces == reduces)
                {
                    Some(last) => (last.count, last.bytes) = (last.count + 1, last.bytes.max(bytes)),
                    None => joined.push(ClassPart { class, count: 1, bytes, reduces }),
                }
            }
            joined
        };
        let rounds = schedule::rounds(&collective, members, own, self.table)?;
        self.kept += rounds.len();
        if self.kept > MOST_ROUNDS {
            return Err(format!(
                "the operations take more than {MOST_ROUNDS} rounds of messages; give a trace with fewer or smaller operations"
            ));
        }
        let rounds =
            rounds.into_iter().map(|round| ClassRound { sends: join(round.sends), receives: join(round.receives) });
        let rounds: Rc<[ClassRound]> = rounds.collect();
        self.known.insert(key, rounds.clone());
        Ok(rounds)
    }
}

fn with_header(bytes: u64) -> f64 {
    (bytes + HEADER_LEN as u64) as f64
}

/// Makes one item of the messages of a lone rank with each rank of a class, where it exchanges one with each in turn: those that it receives come
/// where the first one is, those that it sends where the last one is.
fn join_messages(program: &mut Program, of_rank: &RankTrace, class_of: &[usize], sizes: &[usize]) {
    let mut seen: HashMap<(bool, usize, usize), usize> = HashMap::new();
    let mut sets: HashMap<(bool, usize, usize), Vec<usize>> = HashMap::new();
    for (index, node) in of_rank.nodes.iter().enumerate() {
        let (sends, message) = match &node.work {
            Work::Send(message) => (true, message),
            Work::Receive(message) => (false, message),
            _ => continue,
        };
        let number = seen.entry((sends, message.peer, 0)).or_default();
        sets.entry((sends, class_of[message.peer], *number)).or_default().push(index);
        *number += 1;
    }
    let mut place: Vec<usize> = (0..program.items.len()).collect();
    for ((sends, class, _), set) in sets {
        if set.len() < 2 || set.len() != sizes[class] {
            continue;
        }
        let kept = if sends { set[set.len() - 1] } else { set[0] };
        let after: Vec<usize> = if sends {
            set.iter().flat_map(|index| program.items[*index].after.clone()).collect()
        } else {
            program.items[kept].after.clone()
        };
        let count = set.len();
        set.iter().for_each(|index| place[*index] = kept);
        program.items[kept].after = after;
        if let ItemWork::Exchange { rounds, .. } = &mut program.items[kept].work {
            let many = |parts: &[ClassPart]| parts.iter().map(|part| ClassPart { count, ..*part }).collect();
            let joined =
                rounds.iter().map(|round| ClassRound { sends: many(&round.sends), receives: many(&round.receives) });
            *rounds = joined.collect();
        }
    }
    // What was joined away becomes nothing that takes time, so that places stay.
    for (index, item) in program.items.iter_mut().enumerate() {
        if place[index] != index {
            *item = Item { after: Vec::new(), work: ItemWork::Compute(0.0) };
            continue;
        }
        let mut after: Vec<usize> = item.after.iter().map(|after| place[*after]).collect();
        after.retain(|after| *after < index);
        after.sort_unstable();
        after.dedup();
        item.after = after;
    }
}

/// Whether as many messages go from each class to each other one as are received, so that the n-th sent is the n-th received.
fn check_messages(programs: &[Program]) -> Result<(), String> {
    let mut sent: HashMap<(usize, usize, usize), Vec<usize>> = HashMap::new();
    let mut received = sent.clone();
    for (class, program) in programs.iter().enumerate() {
        let members = program.members.len();
        for item in &program.items {
            let ItemWork::Exchange { lane, rounds, .. } = &item.work else { continue };
            for round in rounds.iter() {
                for part in &round.sends {
                    sent.entry((class, part.class, *lane)).or_default().push(part.count * members);
                }
                for part in &round.receives {
                    received.entry((part.class, class, *lane)).or_default().push(part.count * members);
                }
            }
        }
    }
    match sent == received {
        true => Ok(()),
        false => Err(too_many()),
    }
}
