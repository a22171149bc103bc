//! What a trace takes on a network: messages as flows that share links and processors, from event to event.
//!
//! Each rank begins a node when those before it have ended and its lane is free. A collective goes round by round ([`schedule`](crate::schedule)): a
//! round ends when what it receives has arrived and been combined, and what it sends is no further from its receiver than the socket buffers
//! are long. Messages between two ranks on a lane follow one another. A message is a flow: it takes its share of the sender's and the
//! receiver's pipe, of the processors for each byte, and of the one thread that each lane has on both sides, all shared
//! [max-min fairly](crate::share); it is held back by what a window, losses and a slow start leave it ([`tcp`](crate::tcp)). It arrives a message's
//! latency and the link's delay after its last byte has left.
//!
//! A pipe that is a token bucket lets a burst pass after a pause as fast as the processors manage, and the rest at its rate.
//!
//! A queue that is shorter than what a connection has on its way, and does not hold its sender, overflows now and then ([`tcp::overflows`]), which holds up who
//! waits for what was lost; with several connections of BBR it does so all the time, so that the end of each message is sent twice. Where many answer
//! one at once, and their first windows are more than its queue takes, that costs a time-out.
//!
//! Shares of a pipe are even but for what was measured of their unevenness ([`Costs::unevenness`](crate::network::Costs::unevenness)): what rounds of several lanes
//! lose where each waits for the slower of its directions.
//!
//! Where as many ranks compute as there are cores, the work of communication falls to one of the cores, and so to the rank that computes there: a scheduler moves
//! no thread that has a core of its own, and the kernel wakes a receiver where its sender runs. But it is fair: the rank keeps half of its core. What is beyond
//! that, and all of it elsewhere, is shared evenly.
//!
//! Where every core computes, a message waits for a turn of its receiver's thread, behind those that compute there ([`Costs::turn_s`](crate::network::Costs::turn_s)).
//!
//! What is not simulated: packets, and so the delay in queues; the operating system's hand-overs beyond the message's latency.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap, VecDeque};

use comm_core::splitmix::SplitMix64;
use comm_core::table::Table;

use crate::network::{Congestion, Network, Processors};
use crate::program::{self, ClassPart, Item, ItemWork, MOST_SINGLE_RANKS, Program};
use crate::share::{self, Demand, Use};
use crate::tcp;
use crate::trace::Trace;

/// Whether each rank is simulated by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Each.
    EveryRank,
    /// Of ranks that all do the same, one.
    Classes,
    /// Classes where there are many ranks.
    Auto,
}

/// Ranks beyond which [`Detail::Auto`] simulates classes.
const MANY_RANKS: usize = 16;

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Of one step, in seconds.
    pub step_s: f64,
    /// Ranks, or classes of them, by their first rank.
    pub ranks: Vec<RankOutcome>,
    /// Programs that were simulated.
    pub classes: usize,
}

/// What came out for a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct RankOutcome {
    /// Which: it stands for others, too, where classes were simulated.
    pub rank: usize,
    /// Ranks that it stands for, itself included.
    pub members: usize,
    /// Seconds of a step in which it computed.
    pub computing_s: f64,
    /// Seconds of a step in which it waited: the rest.
    pub exposed_s: f64,
    /// Seconds of a step in which an operation of it was under way.
    pub communicating_s: f64,
    /// Bytes a step that it sent, with the headers of messages.
    pub sent_bytes: f64,
}

impl Outcome {
    /// The rank that waits longest.
    pub fn exposed_s(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.exposed_s).fold(0.0, f64::max)
    }

    /// The share of a step in which ranks compute, over all ranks.
    pub fn utilization(&self) -> f64 {
        let members: usize = self.ranks.iter().map(|rank| rank.members).sum();
        let busy: f64 = self.ranks.iter().map(|rank| rank.computing_s * rank.members as f64).sum();
        if self.step_s > 0.0 { busy / self.step_s / members as f64 } else { 1.0 }
    }

    /// Bytes that the rank that sends most sends in a step.
    pub fn sent_bytes(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.sent_bytes).fold(0.0, f64::max)
    }
}

/// How often the trace is run through: the last time counts, so that connections are warm and what ranks are ahead of each other is settled.
const REPEATS: usize = 2;

/// What a step of `trace` takes on `network`.
///
/// # Errors
/// The trace is none, the link carries nothing, ranks wait for each other for ever, or there are more than 512 ranks that do not all do the same.
pub fn simulate(trace: &Trace, network: &Network, detail: Detail) -> Result<Outcome, String> {
    simulate_from(trace, network, detail, Before::Steps)
}

/// As [`simulate`], but after a pause in which nothing was sent: token buckets are full.
///
/// # Errors
/// Those of [`simulate`].
pub(crate) fn simulate_after_pause(trace: &Trace, network: &Network, detail: Detail) -> Result<Outcome, String> {
    simulate_from(trace, network, detail, Before::Pause)
}

/// What comes before the time through the trace that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Before {
    /// Another time through.
    Steps,
    /// That, and a pause.
    Pause,
}

fn simulate_from(trace: &Trace, network: &Network, detail: Detail, before: Before) -> Result<Outcome, String> {
    trace.check().map_err(|why| why.to_string())?;
    network.link.check(trace.ranks.len())?;
    let (table, ranks) = (Table::fixed(), trace.ranks.len());
    let programs = match detail {
        Detail::EveryRank => program::single(trace, &table)?,
        Detail::Classes => program::collapsed(trace, &network.link, &table)?,
        Detail::Auto if ranks <= MANY_RANKS => program::single(trace, &table)?,
        Detail::Auto => match program::collapsed(trace, &network.link, &table) {
            Err(_) if ranks <= MOST_SINGLE_RANKS => program::single(trace, &table)?,
            programs => programs?,
        },
    };
    let mut simulation = Simulation::new(&programs, network, before);
    simulation.run()?;
    Ok(simulation.outcome(trace.steps))
}

/// A moment at which something happens by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Timed {
    at: f64,
    /// Events of one moment come in the order in which they were foreseen.
    order: u64,
    event: Event,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// A message has arrived.
    Arrives(usize),
    /// A window may grow.
    Grows(usize),
}

impl Eq for Timed {}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.total_cmp(&other.at).then(self.order.cmp(&other.order))
    }
}

/// One direction between two classes on a lane.
struct Connection {
    from: usize,
    to: usize,
    lane: usize,
    sent: usize,
    received: usize,
    /// Messages, by number, that have not both been sent and received.
    open: HashMap<usize, usize>,
    /// Sent, but not begun: the first is on its way.
    queue: VecDeque<usize>,
    /// Bytes that may be on their way; infinite once that is no limit.
    window: f64,
    /// Whether that is foreseen.
    grows: bool,
    idle_since: f64,
    /// Most that it carries, whatever the window.
    most: f64,
    round_trip: f64,
    /// What it may grow to.
    enough: f64,
    /// What overflows of a queue do to it, if any can, and for which part of the time to the next one it has been sending.
    overflows: Option<tcp::Overflows>,
    toward_next: f64,
    /// Connections that it stands for, each of which holds up all.
    stands_for: f64,
}

#[derive(Clone, Debug)]
struct MessageState {
    connection: usize,
    /// Which one of its connection.
    number: usize,
    /// Who waits for its sending and for its coming, by class: the running operations.
    sender: Option<usize>,
    receiver: Option<usize>,
    bytes: f64,
    /// Messages of one sender, and of one receiver.
    count: f64,
    reduces: bool,
    left: f64,
    begun: bool,
    taken_over: bool,
    has_left: bool,
    has_arrived: bool,
    /// Its place among what goes on.
    slot: Option<usize>,
    /// Whether another connection has sent through one of its pipes at the same time.
    shared: bool,
    /// Not before this it arrives.
    not_before: f64,
}

/// A pipe that lets a burst pass.
struct TokenBucket {
    /// The pipe; what it carries in the long run is its capacity.
    resource: usize,
    /// Bytes that may pass at once, at most and now.
    depth: f64,
    tokens: f64,
    /// Bytes a second that go through it.
    used: f64,
    /// Whether a burst passes: until it is empty, and again when a quarter has come back. Smaller ones would be events without end.
    bursts: bool,
}

/// Bytes a second of a pipe whose bucket is not empty: more than any processor moves.
const OF_A_BURST: f64 = 1e12;

/// What a fair scheduler leaves to a thread beside another one on its core.
const HALF_A_CORE: f64 = 0.5;

/// Fewer tokens are none.
const LEAST_TOKENS: f64 = 1.0;

/// What goes on at a rate.
struct Activity {
    what: Running,
    demand: Demand,
    rate: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Running {
    Compute(usize),
    Flow(usize),
}

/// An operation or computation of a class that has begun.
#[derive(Clone, Debug)]
struct Active {
    class: usize,
    item: usize,
    round: usize,
    /// Messages of the round that it still waits for.
    waits: usize,
    left: f64,
    /// Of a computation: its place among what goes on.
    slot: Option<usize>,
}

/// How far a class is.
struct Progress {
    /// By item of this repeat: for how many others it still waits.
    missing: Vec<usize>,
    /// Items that wait for none, and have not begun.
    ready: Vec<usize>,
    followers: Vec<Vec<usize>>,
    left: usize,
    repeat: usize,
    computing: usize,
    communicating: usize,
    /// Times of the last repeat.
    began: f64,
    ended: f64,
    busy: f64,
    under_way: f64,
    sent: f64,
}

struct Simulation<'a> {
    programs: &'a [Program],
    network: &'a Network,
    before: Before,
    capacities: Vec<f64>,
    processors: Vec<usize>,
    /// Whether communication falls to the core on which the first rank computes.
    one_core_communicates: bool,
    pipes: Vec<[usize; 2]>,
    buckets: Vec<TokenBucket>,
    threads: HashMap<(usize, usize), usize>,
    connections: Vec<Connection>,
    of_ends: HashMap<(usize, usize, usize), usize>,
    messages: Vec<MessageState>,
    free_messages: Vec<usize>,
    active: Vec<Active>,
    free_active: Vec<usize>,
    running: Vec<Activity>,
    rates_known: bool,
    timed: BinaryHeap<Reverse<Timed>>,
    order: u64,
    now: f64,
    progress: Vec<Progress>,
    /// Classes that have called each operation of all ranks, and who waits at it.
    gates: HashMap<(usize, usize), Vec<usize>>,
    ended: usize,
}

impl<'a> Simulation<'a> {
    fn new(programs: &'a [Program], network: &'a Network, before: Before) -> Self {
        let mut capacities = Vec::new();
        let mut resource = |capacity: f64| {
            capacities.push(capacity);
            capacities.len() - 1
        };
        let shared = match network.processors {
            Processors::Shared { cores } => Some(resource(cores)),
            Processors::Own { .. } => None,
        };
        let threads = programs.iter().map(|program| program.members.len()).sum::<usize>() as f64 * network.threads;
        let is_single = programs.iter().all(|program| program.members.len() == 1);
        let one_core_communicates = match network.processors {
            Processors::Shared { cores } => is_single && (threads - cores.ceil()).abs() < 0.5,
            Processors::Own { .. } => false,
        };
        let mut processors = Vec::new();
        let (mut pipes, mut buckets) = (Vec::new(), Vec::new());
        for program in programs {
            processors.push(match (shared, network.processors) {
                (Some(shared), _) => shared,
                (None, Processors::Own { cores } | Processors::Shared { cores }) => resource(cores),
            });
            let of_link = network.link.pipes(program.members[0]);
            let both = [of_link.up, of_link.down].map(|pipe| (resource(network.goodput(&pipe)), network.burst(&pipe)));
            buckets.extend(both.into_iter().filter(|(_, depth)| *depth > 0.0).map(|(resource, depth)| TokenBucket {
                resource,
                depth,
                tokens: depth,
                used: 0.0,
                bursts: true,
            }));
            pipes.push(both.map(|(resource, _)| resource));
        }
        let progress = programs.iter().map(Progress::new).collect();
        Simulation {
            programs,
            network,
            before,
            capacities,
            processors,
            one_core_communicates,
            pipes,
            buckets,
            threads: HashMap::new(),
            connections: Vec::new(),
            of_ends: HashMap::new(),
            messages: Vec::new(),
            free_messages: Vec::new(),
            active: Vec::new(),
            free_active: Vec::new(),
            running: Vec::new(),
            rates_known: false,
            timed: BinaryHeap::new(),
            order: 0,
            now: 0.0,
            progress,
            gates: HashMap::new(),
            ended: 0,
        }
    }

    fn run(&mut self) -> Result<(), String> {
        for class in 0..self.programs.len() {
            self.begin_ready(class);
        }
        while self.ended < self.programs.len() {
            self.share_out();
            let next = self.next_moment();
            let Some(next) = next.filter(|next| next.is_finite()) else { return Err(self.stuck()) };
            self.advance(next);
            self.happen();
        }
        Ok(())
    }

    fn stuck(&self) -> String {
        let waiting = self
            .active
            .iter()
            .find(|active| active.waits > 0)
            .map(|active| (self.programs[active.class].members[0], active.item));
        match waiting {
            Some((rank, item)) => {
                format!("the ranks of the trace wait for each other forever: rank {rank} at its node {item}")
            }
            None => "the ranks of the trace wait for each other forever".into(),
        }
    }

    /// Begins every item of a class that waits for nothing.
    fn begin_ready(&mut self, class: usize) {
        loop {
            let progress = &mut self.progress[class];
            if progress.repeat == REPEATS {
                return;
            }
            if progress.left == 0 {
                progress.repeat += 1;
                if progress.repeat < REPEATS {
                    progress.restart(&self.programs[class], self.now);
                    if self.before == Before::Pause {
                        self.fill_buckets(class);
                    }
                    continue;
                }
                progress.ended = self.now;
                self.ended += 1;
                return;
            }
            // In the order of the trace.
            let mut ready = std::mem::take(&mut progress.ready);
            if ready.is_empty() {
                return;
            }
            ready.sort_unstable();
            for item in ready {
                self.begin(class, item);
            }
        }
    }

    fn fill_buckets(&mut self, class: usize) {
        for bucket in self.buckets.iter_mut().filter(|bucket| self.pipes[class].contains(&bucket.resource)) {
            bucket.tokens = bucket.depth;
        }
        self.rates_known = false;
    }

    /// Begins an item.
    fn begin(&mut self, class: usize, item: usize) {
        let programs = self.programs;
        let Item { work, .. } = &programs[class].items[item];
        match work {
            ItemWork::Compute(seconds) if *seconds <= 0.0 => self.progress[class].end(item),
            ItemWork::Compute(seconds) => {
                let active = self.activate(Active { class, item, round: 0, waits: 0, left: *seconds, slot: None });
                let members = programs[class].members.len() as f64;
                let users = match self.network.processors {
                    Processors::Own { .. } => self.network.threads,
                    Processors::Shared { .. } => self.network.threads * members,
                };
                let uses = vec![Use { resource: self.processors[class], each: 1.0, users }];
                self.start_activity(Running::Compute(active), Demand { most: 1.0, uses });
                self.progress[class].computing += 1;
            }
            ItemWork::Exchange { rounds, .. } if rounds.is_empty() => self.progress[class].end(item),
            ItemWork::Exchange { together, .. } => {
                let active = self.activate(Active { class, item, round: 0, waits: 0, left: 0.0, slot: None });
                self.progress[class].communicating += 1;
                match together {
                    None => _ = self.begin_round(active),
                    Some(number) => self.call_together(class, *number, active),
                }
            }
        }
    }

    /// A class calls an operation of all ranks, which begins with the last of them.
    fn call_together(&mut self, class: usize, number: usize, active: usize) {
        let gate = (self.progress[class].repeat, number);
        let waiting = self.gates.entry(gate).or_default();
        waiting.push(active);
        if waiting.len() < self.programs.len() {
            return;
        }
        for each in self.gates.remove(&gate).unwrap_or_default() {
            let of = self.active[each].class;
            if self.begin_round(each) && of != class {
                self.begin_ready(of);
            }
        }
    }

    fn activate(&mut self, active: Active) -> usize {
        match self.free_active.pop() {
            Some(index) => {
                self.active[index] = active;
                index
            }
            None => {
                self.active.push(active);
                self.active.len() - 1
            }
        }
    }

    /// Begins the rounds of an operation, as far as they end at once; whether all have.
    fn begin_round(&mut self, active: usize) -> bool {
        loop {
            let Active { class, item, round, .. } = self.active[active];
            let programs = self.programs;
            let ItemWork::Exchange { rounds, lane, .. } = &programs[class].items[item].work else { return false };
            let Some(current) = rounds.get(round) else {
                self.free_active.push(active);
                let progress = &mut self.progress[class];
                progress.communicating -= 1;
                progress.end(item);
                return true;
            };
            self.active[active].round += 1;
            self.active[active].waits = 0;
            for part in &current.sends {
                let waits = self.send(active, (class, part.class, *lane), part);
                self.active[active].waits += usize::from(waits);
                if self.progress[class].repeat + 1 == REPEATS {
                    self.progress[class].sent += part.bytes * part.count as f64;
                }
            }
            for part in &current.receives {
                let waits = self.receive(active, (part.class, class, *lane), part);
                self.active[active].waits += usize::from(waits);
            }
            if self.active[active].waits > 0 {
                return false;
            }
        }
    }

    fn connection(&mut self, ends: (usize, usize, usize)) -> usize {
        if let Some(known) = self.of_ends.get(&ends) {
            return *known;
        }
        let (from, to, lane) = ends;
        let rank = |class: usize| self.programs[class].members[0];
        // A class that sends to itself stands for two of its ranks.
        let (a, b) =
            (rank(from), if from == to { self.programs[to].members.last().copied().unwrap_or(0) } else { rank(to) });
        let round_trip = self.network.round_trip_s(a, b);
        let most = self.network.connection_rate(a, b);
        let window = if round_trip < tcp::SHORTEST_ROUND_TRIP_S { f64::INFINITY } else { self.initial_window() };
        let rate = self.capacities[self.pipes[from][0]].min(self.capacities[self.pipes[to][1]]).min(most);
        let overflows =
            self.queue(from, to).map(|queue| tcp::overflows(rate, queue, self.network.segment(), round_trip));
        let ranks: usize = self.programs.iter().map(|program| program.members.len()).sum();
        let toward_next = (a as f64 + 0.5) / ranks as f64;
        let stands_for = self.programs[from].members.len() as f64;
        let connection = Connection {
            from,
            to,
            lane,
            sent: 0,
            received: 0,
            open: HashMap::new(),
            queue: VecDeque::new(),
            window,
            grows: false,
            idle_since: 0.0,
            most,
            round_trip,
            enough: (rate * round_trip).min(self.network.costs.window_bytes),
            overflows,
            toward_next: if stands_for > 1.0 { 0.5 } else { toward_next },
            stands_for,
        };
        self.connections.push(connection);
        self.of_ends.insert(ends, self.connections.len() - 1);
        self.connections.len() - 1
    }

    /// The queue of the slower of the two pipes between classes, in bytes, where it has a rate and a limit at which it loses packets.
    fn queue(&self, from: usize, to: usize) -> Option<f64> {
        let rank = |class: usize| self.programs[class].members[0];
        let (up, down) = (self.network.link.pipes(rank(from)).up, self.network.link.pipes(rank(to)).down);
        let rate = |pipe: &crate::network::Pipe| pipe.bits_per_s.unwrap_or(f64::INFINITY);
        let slower = if rate(&down) < rate(&up) { down } else { up };
        slower.bits_per_s.and(slower.queue_bytes).filter(|_| !slower.holds_sender)
    }

    /// By how much a message comes later because a queue overflowed while it was sent.
    fn held_up(&mut self, message: usize) -> f64 {
        let MessageState { connection, bytes, shared, .. } = self.messages[message];
        let costs = self.network.costs;
        let (from, to) = (self.connections[connection].from, self.connections[connection].to);
        let rate = self.capacities[self.pipes[from][0]].min(self.capacities[self.pipes[to][1]]);
        let Some(queue) = self.queue(from, to) else { return 0.0 };
        let of = &mut self.connections[connection];
        let Some(overflows) = of.overflows else { return 0.0 };
        if costs.congestion == Congestion::Measured {
            let overflows_always = shared && queue < tcp::QUEUE_OF_BBR * rate * of.round_trip;
            return if overflows_always { overflows.late_s } else { 0.0 };
        }
        let on_the_way = bytes.max(costs.ahead_bytes).min(costs.window_bytes);
        if on_the_way <= queue + rate * of.round_trip {
            return 0.0;
        }
        of.toward_next += bytes / rate / overflows.every_s * of.stands_for;
        let times = of.toward_next.floor();
        of.toward_next -= times;
        times * overflows.late_s
    }

    fn initial_window(&self) -> f64 {
        tcp::INITIAL_WINDOW * self.network.segment()
    }

    /// The message of this number, which both ends name.
    fn message(&mut self, connection: usize, number: usize, part: &ClassPart) -> usize {
        if let Some(known) = self.connections[connection].open.get(&number) {
            return *known;
        }
        let state = MessageState {
            connection,
            number,
            sender: None,
            receiver: None,
            bytes: part.bytes,
            count: part.count as f64,
            reduces: false,
            left: part.bytes,
            begun: false,
            taken_over: false,
            has_left: false,
            has_arrived: false,
            slot: None,
            shared: false,
            not_before: 0.0,
        };
        let index = match self.free_messages.pop() {
            Some(index) => {
                self.messages[index] = state;
                index
            }
            None => {
                self.messages.push(state);
                self.messages.len() - 1
            }
        };
        self.connections[connection].open.insert(number, index);
        index
    }

    /// Hands a message over for sending; whether that has to be waited for.
    fn send(&mut self, active: usize, ends: (usize, usize, usize), part: &ClassPart) -> bool {
        let connection = self.connection(ends);
        let number = self.connections[connection].sent;
        self.connections[connection].sent += 1;
        let message = self.message(connection, number, part);
        let state = &mut self.messages[message];
        (state.bytes, state.left, state.count) = (part.bytes, part.bytes, part.count as f64);
        state.taken_over = part.bytes <= self.network.costs.buffer_bytes;
        state.sender = Some(active).filter(|_| !state.taken_over);
        let waits = !state.taken_over;
        self.connections[connection].queue.push_back(message);
        if self.connections[connection].queue.len() == 1 {
            self.begin_flow(message);
        }
        waits
    }

    /// Asks for a message; whether it has to be waited for.
    fn receive(&mut self, active: usize, ends: (usize, usize, usize), part: &ClassPart) -> bool {
        let connection = self.connection(ends);
        let number = self.connections[connection].received;
        self.connections[connection].received += 1;
        let message = self.message(connection, number, part);
        let state = &mut self.messages[message];
        if state.has_arrived {
            self.connections[connection].open.remove(&number);
            self.free_messages.push(message);
            return false;
        }
        state.receiver = Some(active);
        state.reduces = part.reduces;
        if state.begun && !state.has_left {
            // It may go on beyond the buffers, and costs what combining costs.
            self.start_flow(message);
        }
        true
    }

    /// Begins with the first message in a connection's queue.
    fn begin_flow(&mut self, message: usize) {
        let connection = self.messages[message].connection;
        self.messages[message].begun = true;
        let (now, fresh) = (self.now, self.initial_window());
        self.note_sharing(message);
        let of = &mut self.connections[connection];
        let to = of.to;
        if self.network.costs.congestion == Congestion::Losses
            && of.round_trip >= tcp::SHORTEST_ROUND_TRIP_S
            && now - of.idle_since > tcp::RETRANSMISSION_S.max(of.round_trip)
        {
            of.window = fresh;
        }
        if of.window >= of.enough {
            of.window = f64::INFINITY;
        }
        if of.window.is_finite() && !of.grows {
            of.grows = true;
            let at = now + of.round_trip;
            self.foresee(at, Event::Grows(connection));
        }
        self.messages[message].not_before = self.incast(message, to);
        self.start_flow(message);
    }

    /// Notes of a message that begins, and of those that are on their way, that they share a pipe.
    fn note_sharing(&mut self, message: usize) {
        let ends = |message: &MessageState| {
            let Connection { from, to, .. } = self.connections[message.connection];
            (message.connection, from, to)
        };
        let (own, from, to) = ends(&self.messages[message]);
        let shares = |other: usize| {
            let (connection, its_from, its_to) = ends(&self.messages[other]);
            connection != own && (its_from == from || its_to == to)
        };
        let others = self.running.iter().filter_map(|activity| match activity.what {
            Running::Flow(other) if shares(other) => Some(other),
            _ => None,
        });
        let others: Vec<usize> = others.collect();
        self.messages[message].shared |= !others.is_empty();
        others.into_iter().for_each(|other| self.messages[other].shared = true);
    }

    /// When a message that is one of many to one receiver arrives at the earliest: after a time-out, where their first windows alone are more than
    /// its queue takes.
    fn incast(&self, message: usize, to: usize) -> f64 {
        let Some(queue) = self.network.link.pipes(self.programs[to].members[0]).down.queue_bytes else { return 0.0 };
        let of_one = |message: &MessageState| {
            let from = self.connections[message.connection].from;
            let into = self.connections[message.connection].to;
            let members = |class: usize| self.programs[class].members.len() as f64;
            (into == to)
                .then_some(message.count * members(from) / members(to) * message.bytes.min(self.initial_window()))
        };
        let others = self.running.iter().filter_map(|activity| match activity.what {
            Running::Flow(other) => of_one(&self.messages[other]),
            Running::Compute(_) => None,
        });
        let at_once = others.sum::<f64>() + of_one(&self.messages[message]).unwrap_or(0.0);
        let on_the_way =
            self.capacities[self.pipes[to][1]] * self.connections[self.messages[message].connection].round_trip;
        if at_once > queue + on_the_way { self.now + tcp::RETRANSMISSION_S } else { 0.0 }
    }

    /// Has a message flow, as far as it may without its receiver.
    fn start_flow(&mut self, message: usize) {
        self.stop(Running::Flow(message));
        let state = &self.messages[message];
        if state.receiver.is_none() && state.bytes - state.left >= self.network.costs.buffer_bytes {
            return;
        }
        let demand = self.demand(message);
        self.start_activity(Running::Flow(message), demand);
    }

    fn demand(&mut self, message: usize) -> Demand {
        let (connection, count, reduces) = {
            let state = &self.messages[message];
            (state.connection, state.count, state.reduces)
        };
        let Connection { from, to, lane, most, window, round_trip, .. } = self.connections[connection];
        let members = |class: usize| self.programs[class].members.len() as f64;
        let all = count * members(from);
        // Messages that one receiver gets.
        let into = all / members(to);
        let costs = self.network.costs;
        let receive = costs.receive_s_per_byte + if reduces { costs.reduce_s_per_byte } else { 0.0 };
        let mut uses = Vec::with_capacity(6);
        let mut add = |resource: usize, each: f64, users: f64| {
            if each > 0.0 {
                uses.push(Use { resource, each, users });
            }
        };
        // One that gets twice an even share competes as two users that get half of it each.
        let weight = self.weight(message);
        for (resource, users) in [(self.pipes[from][0], count), (self.pipes[to][1], into)] {
            if self.capacities[resource].is_finite() {
                add(resource, 1.0 / weight, users * weight);
            }
        }
        let shared = matches!(self.network.processors, Processors::Shared { .. });
        add(self.processors[from], costs.send_s_per_byte, if shared { all } else { count });
        add(self.processors[to], receive, if shared { all } else { into });
        for (class, each, users) in [(from, costs.send_s_per_byte, count), (to, receive, into)] {
            let thread = match self.threads.get(&(class, lane)) {
                Some(thread) => *thread,
                None => {
                    self.capacities.push(1.0);
                    self.threads.insert((class, lane), self.capacities.len() - 1);
                    self.capacities.len() - 1
                }
            };
            add(thread, each, users);
        }
        // What fits into the window goes at once.
        let of_window = if window < self.messages[message].left { window / round_trip } else { f64::INFINITY };
        Demand { most: most.min(of_window), uses }
    }

    /// The share that a message gets of a pipe, in even ones. Which connection is ahead is as good as chance; here it is the same chance in each simulation. One
    /// that stands for many is even.
    fn weight(&self, message: usize) -> f64 {
        let MessageState { connection, number, .. } = self.messages[message];
        let Connection { from, to, lane, .. } = self.connections[connection];
        if [from, to].iter().any(|class| self.programs[*class].members.len() > 1) {
            return 1.0;
        }
        let chance = SplitMix64::stream(0, &[from, to, lane, number].map(|part| part as u64)).next_u64();
        let unevenness = self.network.costs.unevenness;
        if chance.is_multiple_of(2) { 1.0 + unevenness } else { 1.0 - unevenness }
    }

    fn start_activity(&mut self, what: Running, demand: Demand) {
        *self.slot(what) = Some(self.running.len());
        self.running.push(Activity { what, demand, rate: 0.0 });
        self.rates_known = false;
    }

    fn slot(&mut self, what: Running) -> &mut Option<usize> {
        match what {
            Running::Compute(active) => &mut self.active[active].slot,
            Running::Flow(message) => &mut self.messages[message].slot,
        }
    }

    fn foresee(&mut self, at: f64, event: Event) {
        self.order += 1;
        self.timed.push(Reverse(Timed { at, order: self.order, event }));
    }

    fn share_out(&mut self) {
        if self.rates_known {
            return;
        }
        let mut capacities = self.capacities.clone();
        for bucket in &mut self.buckets {
            bucket.bursts |= bucket.tokens >= bucket.depth / 4.0;
            if bucket.bursts {
                capacities[bucket.resource] = OF_A_BURST;
            }
        }
        let rates = share::rates(self.running.iter().map(|activity| &activity.demand), &capacities);
        for (activity, rate) in self.running.iter_mut().zip(rates) {
            activity.rate = rate;
        }
        if self.one_core_communicates {
            self.take_from_one();
        }
        for bucket in &mut self.buckets {
            let pipe = bucket.resource;
            let through = self.running.iter().flat_map(|activity| {
                let uses = activity.demand.uses.iter().filter(move |each| each.resource == pipe);
                uses.map(move |each| activity.rate * each.each * each.users)
            });
            bucket.used = through.sum();
        }
        self.rates_known = true;
    }

    /// While all ranks compute, takes what communication needs of the processors from the first one, instead of from all.
    fn take_from_one(&mut self) {
        let processor = self.processors[0];
        let of_flow = |activity: &Activity| {
            let uses = activity.demand.uses.iter().filter(|each| each.resource == processor);
            activity.rate * uses.map(|each| each.each * each.users).sum::<f64>()
        };
        let is_flow = |activity: &&Activity| matches!(activity.what, Running::Flow(_));
        let taken = self.running.iter().filter(is_flow).map(of_flow).sum::<f64>().min(HALF_A_CORE);
        let ranks = self.programs.len() as f64;
        let computing: Vec<(usize, usize)> = self
            .running
            .iter()
            .enumerate()
            .filter_map(|(place, activity)| match activity.what {
                Running::Compute(active) => Some((place, self.active[active].class)),
                Running::Flow(_) => None,
            })
            .collect();
        if computing.len() < self.programs.len() {
            return;
        }
        for (place, class) in computing {
            let rate = &mut self.running[place].rate;
            *rate += taken / ranks - if class == 0 { taken } else { 0.0 };
            *rate = rate.min(1.0);
        }
    }

    /// What an activity has to do until something happens.
    fn until_event(&self, what: Running) -> f64 {
        match what {
            Running::Compute(active) => self.active[active].left,
            Running::Flow(message) => {
                let MessageState { left, bytes, receiver, taken_over, .. } = &self.messages[message];
                let buffer = self.network.costs.buffer_bytes;
                let mut until = *left;
                if receiver.is_none() {
                    until = until.min(buffer - (bytes - left));
                }
                if !taken_over {
                    until = until.min(left - buffer);
                }
                // Sums of parts are no more exact than this.
                if until <= bytes * 1e-12 { 0.0 } else { until }
            }
        }
    }

    fn next_moment(&self) -> Option<f64> {
        let of = |activity: &Activity| {
            let until = self.until_event(activity.what);
            // What nothing holds back takes no time.
            if until <= 0.0 || activity.rate == f64::INFINITY { self.now } else { self.now + until / activity.rate }
        };
        let soonest = self.running.iter().map(of).min_by(f64::total_cmp);
        let timed = self.timed.peek().map(|Reverse(timed)| timed.at);
        let empty = |bucket: &TokenBucket| {
            let faster = bucket.used - self.capacities[bucket.resource];
            (bucket.bursts && faster > 0.0).then(|| self.now + bucket.tokens / faster)
        };
        let emptied = self.buckets.iter().filter_map(empty);
        soonest.into_iter().chain(timed).chain(emptied).min_by(f64::total_cmp)
    }

    fn advance(&mut self, next: f64) {
        let passed = (next - self.now).max(0.0);
        // What is so near to its event is there: a moment is no more exact than its last digit.
        let slack = 1e-12 + next * 1e-15;
        for activity in &self.running {
            let until = self.until_event(activity.what);
            let done = if activity.rate == f64::INFINITY { until } else { activity.rate * passed };
            let is_there = done + activity.rate * slack >= until;
            match activity.what {
                Running::Compute(active) if is_there => self.active[active].left = 0.0,
                Running::Compute(active) => self.active[active].left -= done,
                Running::Flow(message) => self.messages[message].left -= if is_there { until } else { done },
            }
        }
        for progress in &mut self.progress {
            if progress.repeat + 1 == REPEATS {
                progress.busy += if progress.computing > 0 { passed } else { 0.0 };
                progress.under_way += if progress.communicating > 0 { passed } else { 0.0 };
            }
        }
        for bucket in &mut self.buckets {
            let gained = (self.capacities[bucket.resource] - bucket.used) * passed;
            bucket.tokens = (bucket.tokens + gained).clamp(0.0, bucket.depth);
            if bucket.bursts && bucket.tokens <= LEAST_TOKENS {
                (bucket.tokens, bucket.bursts, self.rates_known) = (0.0, false, false);
            }
        }
        self.now = next;
    }

    /// Lets happen what is due.
    fn happen(&mut self) {
        let mut touched: Vec<usize> = Vec::new();
        let due: Vec<Running> =
            self.running.iter().filter(|activity| self.is_due(activity)).map(|each| each.what).collect();
        for what in due {
            match what {
                Running::Compute(active) => {
                    self.stop(what);
                    let Active { class, item, .. } = self.active[active];
                    self.free_active.push(active);
                    self.progress[class].computing -= 1;
                    self.progress[class].end(item);
                    touched.push(class);
                }
                Running::Flow(message) => self.flow_event(message, &mut touched),
            }
        }
        while let Some(Reverse(timed)) = self.timed.peek().copied().filter(|timed| timed.0.at <= self.now) {
            self.timed.pop();
            match timed.event {
                Event::Arrives(message) => self.arrive(message, &mut touched),
                Event::Grows(connection) => self.grow(connection),
            }
        }
        for class in touched {
            self.begin_ready(class);
        }
    }

    fn is_due(&self, activity: &Activity) -> bool {
        self.until_event(activity.what) <= 0.0
    }

    fn stop(&mut self, what: Running) {
        let Some(slot) = self.slot(what).take() else { return };
        self.running.swap_remove(slot);
        if let Some(moved) = self.running.get(slot).map(|moved| moved.what) {
            *self.slot(moved) = Some(slot);
        }
        self.rates_known = false;
    }

    /// A flow has come to its end, to the end of the buffers, or so near to its end that its sender may go on.
    fn flow_event(&mut self, message: usize, touched: &mut Vec<usize>) {
        let buffer = self.network.costs.buffer_bytes;
        let nothing = self.messages[message].bytes * 1e-12;
        let MessageState { left, bytes, taken_over, receiver, .. } = self.messages[message];
        if !taken_over && left <= buffer + nothing {
            self.messages[message].taken_over = true;
            if let Some(sender) = self.messages[message].sender.take() {
                self.done_with(sender, touched);
            }
        }
        if left > nothing {
            if receiver.is_none() && bytes - left + nothing >= buffer {
                self.stop(Running::Flow(message));
            }
            return;
        }
        self.stop(Running::Flow(message));
        self.messages[message].has_left = true;
        let connection = self.messages[message].connection;
        let Connection { from, to, .. } = self.connections[connection];
        let programs = self.programs;
        let last = |class: usize| programs[class].members.last().copied().unwrap_or(0);
        let delay = self.network.link.delay_s(programs[from].members[0], last(to));
        let late = self.held_up(message) + self.network.costs.turn_s * self.before_a_turn(to);
        let at = f64::max(self.now, self.messages[message].not_before) + self.network.costs.message_s + delay + late;
        self.foresee(at, Event::Arrives(message));
        self.connections[connection].queue.pop_front();
        self.connections[connection].idle_since = self.now;
        if let Some(next) = self.connections[connection].queue.front().copied() {
            self.begin_flow(next);
        }
    }

    /// Threads that compute on each core of a class, where there are as many as cores: a thread that is woken waits for as many turns.
    fn before_a_turn(&self, class: usize) -> f64 {
        let threads = self.network.threads;
        let (cores, computing) = match self.network.processors {
            Processors::Own { cores } => (cores, self.progress[class].computing as f64 * threads),
            Processors::Shared { cores } => {
                let of_class = |(program, progress): (&Program, &Progress)| {
                    (program.members.len() * progress.computing) as f64 * threads
                };
                (cores, self.programs.iter().zip(&self.progress).map(of_class).sum())
            }
        };
        // Cores do a little less than as many of them alone.
        let cores = cores.ceil();
        if computing >= cores { computing / cores } else { 0.0 }
    }

    fn arrive(&mut self, message: usize, touched: &mut Vec<usize>) {
        self.messages[message].has_arrived = true;
        let Some(receiver) = self.messages[message].receiver else { return };
        let MessageState { connection, number, .. } = self.messages[message];
        self.connections[connection].open.remove(&number);
        self.free_messages.push(message);
        self.done_with(receiver, touched);
    }

    /// An operation waits for one message less.
    fn done_with(&mut self, active: usize, touched: &mut Vec<usize>) {
        self.active[active].waits -= 1;
        if self.active[active].waits == 0 {
            let class = self.active[active].class;
            if self.begin_round(active) {
                touched.push(class);
            }
        }
    }

    fn grow(&mut self, connection: usize) {
        let now = self.now;
        let of = &mut self.connections[connection];
        of.grows = false;
        let Some(message) = of.queue.front().copied().filter(|_| of.window.is_finite()) else { return };
        of.window *= 2.0;
        if of.window >= of.enough {
            of.window = f64::INFINITY;
        } else {
            of.grows = true;
            let at = now + of.round_trip;
            self.foresee(at, Event::Grows(connection));
        }
        if self.messages[message].slot.is_some() {
            self.start_flow(message);
        }
    }

    fn outcome(&self, steps: u64) -> Outcome {
        let steps = steps as f64;
        let end = |ended: fn(&Progress) -> f64| self.progress.iter().map(ended).fold(0.0, f64::max);
        let step_s = (end(|progress| progress.ended) - end(|progress| progress.began)) / steps;
        let of_class = |(program, progress): (&Program, &Progress)| RankOutcome {
            rank: program.members[0],
            members: program.members.len(),
            computing_s: progress.busy / steps,
            exposed_s: (step_s - progress.busy / steps).max(0.0),
            communicating_s: progress.under_way / steps,
            sent_bytes: progress.sent / steps,
        };
        let ranks = self.programs.iter().zip(&self.progress).map(of_class).collect();
        Outcome { step_s, ranks, classes: self.programs.len() }
    }
}

impl Progress {
    fn new(program: &Program) -> Self {
        let mut followers = vec![Vec::new(); program.items.len()];
        for (index, item) in program.items.iter().enumerate() {
            item.after.iter().for_each(|after| followers[*after].push(index));
        }
        let mut progress = Progress {
            missing: Vec::new(),
            ready: Vec::new(),
            followers,
            left: 0,
            repeat: 0,
            computing: 0,
            communicating: 0,
            began: 0.0,
            ended: 0.0,
            busy: 0.0,
            under_way: 0.0,
            sent: 0.0,
        };
        progress.restart(program, 0.0);
        progress
    }

    fn restart(&mut self, program: &Program, now: f64) {
        self.missing = program.items.iter().map(|item| item.after.len()).collect();
        self.ready = (0..program.items.len()).filter(|item| self.missing[*item] == 0).collect();
        self.left = program.items.len();
        self.began = now;
    }

    fn end(&mut self, item: usize) {
        self.left -= 1;
        for follower in &self.followers[item] {
            self.missing[*follower] -= 1;
            if self.missing[*follower] == 0 {
                self.ready.push(*follower);
            }
        }
    }
}
