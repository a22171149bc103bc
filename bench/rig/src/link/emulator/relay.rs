//! The loop of an emulator: packets come from devices, wait for their time, and go to other devices.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Duration;

use super::agenda::{Agenda, Event};
use super::commands::{Command, Commands};
use super::counters::{Counters, EndCounters, Lateness, PipeCounters};
use super::device::Device;
use super::model::{Pipe, Verdict, nanos};
use super::spec::{EmulatorSpec, EndSpec, PipeSpec};
use super::sys;
use crate::sys::now;
use crate::sys::process_cpu_time;

/// Packets that are fetched from one device, or handed on, before others get their turn.
const BATCH: usize = 64;

/// Bytes under way at most, with what it takes to keep them.
const MEMORY: usize = 256 << 20;
const OVERHEAD: usize = 128;

/// A sleep ends earlier by what the last ones took too long, but for no more than this, which is spent awake.
const LONGEST_SPIN_NS: u64 = 50_000;

/// Packets go out a few at a time if that makes none later than this.
const LONGEST_SLACK_NS: u64 = 100_000;

/// A wait that took longer than this has slept: nothing was there when it began.
const SLEPT_NS: u64 = 5_000;

/// How long a device may refuse a packet.
const REFUSAL_NS: u64 = 10_000_000;

/// All that an emulator works on.
pub(super) struct Relay {
    seed: u64,
    ends: Vec<End>,
    by_address: HashMap<Ipv4Addr, usize>,
    /// What is in its sender's `up`, and what is in its receiver's `down`.
    ups: Agenda,
    downs: Agenda,
    /// No packet is through its `up` sooner than this after it was fetched.
    shortest_up: u64,
    /// Of the next event.
    number: u64,
    under_way: usize,
    /// Packets closer to each other than this go out together, a few at a time: most of what a packet costs is to wake up for it.
    slack: u64,
    /// When the last wait ended.
    woke: u64,
    /// By how much sleeps end too late.
    oversleep: u64,
    scratch: Box<[u8]>,
    /// What is counted for all ends together.
    totals: Totals,
    began: CounterBaseline,
}

struct End {
    device: Device,
    up: Direction,
    down: Direction,
    /// When there was last nothing to fetch.
    empty_at: u64,
}

struct Direction {
    pipe: Pipe,
    late: Lateness,
    delay: u64,
}

#[derive(Default)]
struct Totals {
    strangers: u64,
    no_memory: u64,
    unwritten: u64,
}

/// What other counters were at the last reset.
#[derive(Default)]
struct CounterBaseline {
    at: u64,
    cpu_s: f64,
    starved_s: f64,
    dropped: u64,
}

impl Relay {
    /// `devices` are those of the spec's ends, in order.
    pub(super) fn new(spec: &EmulatorSpec, devices: Vec<Device>) -> Self {
        let direction = |pipe: &PipeSpec, number: usize| Direction {
            pipe: Pipe::new(pipe.clone(), spec.seed, number as u64),
            late: Lateness::default(),
            delay: nanos(pipe.delay),
        };
        let ends = devices.into_iter().zip(&spec.ends).enumerate().map(|(number, (device, end))| End {
            device,
            up: direction(&end.up, 2 * number),
            down: direction(&end.down, 2 * number + 1),
            empty_at: now(),
        });
        let mut relay = Relay {
            seed: spec.seed,
            ends: ends.collect(),
            by_address: spec.ends.iter().enumerate().map(|(number, end)| (end.address, number)).collect(),
            ups: Agenda::default(),
            downs: Agenda::default(),
            shortest_up: spec.ends.iter().map(|end| nanos(end.up.delay - end.up.jitter)).min().unwrap_or(0),
            number: 0,
            under_way: 0,
            slack: slack(spec),
            woke: 0,
            oversleep: 0,
            // More than any packet has, so that none is cut.
            scratch: vec![0; 1 << 16].into(),
            totals: Totals::default(),
            began: CounterBaseline::default(),
        };
        relay.reset();
        relay
    }

    /// Works until nobody gives commands any more.
    ///
    /// # Errors
    /// A device is gone, or a command or its answer makes no sense.
    pub(super) fn run(&mut self, commands: &mut Commands, answers: &mut dyn Write) -> Result<(), String> {
        let watch = |file: &File| libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut fds: Vec<_> = self.ends.iter().map(|end| watch(&end.device.packets)).collect();
        fds.push(watch(commands.input()));
        let mut more = false;
        loop {
            self.wait(&mut fds, more).map_err(|error| format!("waiting for packets: {error}"))?;
            let (commanded, devices) =
                fds.split_last().map_or((false, &[][..]), |(last, all)| (last.revents != 0, all));
            for (number, _) in devices.iter().enumerate().filter(|(_, fd)| fd.revents != 0) {
                let outcome = self.fetch(number);
                outcome.map_err(|error| format!("{} is gone: {error}", self.ends[number].device.describe()))?;
            }
            more = self.hand_on();
            if commanded {
                if !commands.fill()? {
                    return Ok(());
                }
                while let Some(command) = commands.next()? {
                    let said = self.obey(command, answers).and_then(|()| answers.flush());
                    said.map_err(|error| format!("answering: {error}"))?;
                }
            }
        }
    }

    /// Waits until a packet or a command comes or the next event is due; with `hurry`, only looks.
    fn wait(&mut self, fds: &mut [libc::pollfd], hurry: bool) -> io::Result<()> {
        let up = self.ups.next().map(|at| at.saturating_sub(self.shortest_up));
        let due = [up, self.downs.next()].into_iter().flatten().min();
        let before = now();
        let gap = due.map(|at| if hurry { 0 } else { at.max(self.woke + self.slack).saturating_sub(before) });
        // Where packets follow each other more closely than sleeps end, they too go out a few at a time: always being awake would take a
        // core from those whose packets these are.
        let sleep = gap.map(|gap| gap.checked_sub(self.oversleep).filter(|less| *less > 0).unwrap_or(gap));
        sys::wait(fds, sleep)?;
        self.woke = now();
        let slept = self.woke - before > SLEPT_NS;
        for (end, fd) in self.ends.iter_mut().zip(fds.iter()) {
            if slept || fd.revents == 0 {
                end.empty_at = self.woke;
            }
        }
        if let (Some(due), Some(sleep @ 1..)) = (due, sleep)
            && fds.iter().all(|fd| fd.revents == 0)
        {
            let late = self.woke.saturating_sub(before + sleep).min(LONGEST_SPIN_NS);
            self.oversleep = (7 * self.oversleep + late) / 8;
            if due.saturating_sub(self.woke) <= LONGEST_SPIN_NS {
                while now() < due {
                    std::hint::spin_loop();
                }
            }
        }
        Ok(())
    }

    /// Takes the packets that an end has sent.
    fn fetch(&mut self, from: usize) -> io::Result<()> {
        for _ in 0..BATCH {
            match (&self.ends[from].device.packets).read(&mut self.scratch) {
                Ok(bytes) => self.take(from, bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.ends[from].empty_at = now();
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes the packet in the scratch buffer.
    fn take(&mut self, from: usize, bytes: usize) {
        let at = now();
        let packet = &self.scratch[..bytes];
        let Some(to) = destination(packet).and_then(|address| self.by_address.get(&address).copied()) else {
            self.totals.strangers += 1;
            return;
        };
        let end = &mut self.ends[from];
        end.up.late.add(at.saturating_sub(end.empty_at));
        let verdict = end.up.pipe.offer(at, bytes as u64);
        if let Verdict::Arrives { .. } = verdict {
            let packet = Rc::from(packet);
            self.put_down(verdict, to, packet, |relay| &mut relay.ups);
        }
    }

    /// Deals with what is due, or part of it; whether more may be.
    fn hand_on(&mut self) -> bool {
        let mut at = now();
        // No packet can come to these pipes before those that are taken here any more: what has not been fetched yet takes at least the
        // shortest time from now. So they are dealt with now, at the time that they are due, which saves waking up for each.
        while let Some(Event { at, to, packet, .. }) = self.ups.take(at + self.shortest_up) {
            self.under_way -= packet.len() + OVERHEAD;
            let verdict = self.ends[to].down.pipe.offer(at, packet.len() as u64);
            self.put_down(verdict, to, packet, |relay| &mut relay.downs);
        }
        for _ in 0..BATCH {
            let Some(Event { at: due, to, packet, .. }) = self.downs.take(at) else { return false };
            self.under_way -= packet.len() + OVERHEAD;
            let written = self.write(to, &packet);
            at = now();
            self.totals.unwritten += u64::from(!written);
            self.ends[to].down.late.add(at - due);
        }
        true
    }

    fn put_down(&mut self, verdict: Verdict, to: usize, packet: Rc<[u8]>, agenda: impl Fn(&mut Relay) -> &mut Agenda) {
        let Verdict::Arrives { at, twice } = verdict else { return };
        for _ in 0..1 + usize::from(twice) {
            let bytes = packet.len() + OVERHEAD;
            if self.under_way + bytes > MEMORY {
                self.totals.no_memory += 1;
                continue;
            }
            self.under_way += bytes;
            self.number += 1;
            let event = Event { at, number: self.number, to, packet: packet.clone() };
            agenda(self).put(event);
        }
    }

    /// Whether the device took the packet.
    fn write(&self, to: usize, packet: &[u8]) -> bool {
        let mut device = &self.ends[to].device.packets;
        let end = now() + REFUSAL_NS;
        loop {
            match device.write(packet) {
                Ok(bytes) => return bytes == packet.len(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = end.saturating_sub(now());
                    let mut fd = [libc::pollfd { fd: device.as_raw_fd(), events: libc::POLLOUT, revents: 0 }];
                    if left == 0 || sys::wait(&mut fd, Some(left)).is_err() {
                        return false;
                    }
                }
                Err(_) => return false,
            }
        }
    }

    fn obey(&mut self, command: Command, answers: &mut dyn Write) -> io::Result<()> {
        match command {
            Command::Counters => {
                serde_json::to_writer(&mut *answers, &self.counters())?;
                writeln!(answers)
            }
            Command::Reset => {
                self.reset();
                writeln!(answers, "done")
            }
        }
    }

    fn counters(&mut self) -> Counters {
        let of = |direction: &Direction| PipeCounters::new(direction.pipe.tally(), &direction.late, direction.delay);
        let dropped = self.dropped();
        Counters {
            ends: self.ends.iter().map(|end| EndCounters { up: of(&end.up), down: of(&end.down) }).collect(),
            cpu_s: (cpu_s() - self.began.cpu_s).max(0.0),
            wall_s: (now() - self.began.at) as f64 / 1e9,
            starved_s: (starved_s() - self.began.starved_s).max(0.0),
            strangers: self.totals.strangers,
            missed: dropped.saturating_sub(self.began.dropped),
            no_memory: self.totals.no_memory,
            unwritten: self.totals.unwritten,
        }
    }

    /// Counts and decides from the start. Packets that are under way go on.
    fn reset(&mut self) {
        for (number, end) in self.ends.iter_mut().enumerate() {
            for (direction, number) in [(&mut end.up, 2 * number), (&mut end.down, 2 * number + 1)] {
                direction.pipe.reset(self.seed, number as u64);
                direction.late = Lateness::default();
            }
        }
        self.totals = Totals::default();
        self.began = CounterBaseline { at: now(), cpu_s: cpu_s(), starved_s: starved_s(), dropped: self.dropped() };
    }

    fn dropped(&mut self) -> u64 {
        self.ends.iter_mut().map(|end| end.device.dropped()).sum()
    }
}

/// A hundredth of the delay of the fastest direction, or less.
fn slack(spec: &EmulatorSpec) -> u64 {
    let shortest = |delay: fn(&EndSpec) -> Duration| spec.ends.iter().map(|end| nanos(delay(end))).min().unwrap_or(0);
    ((shortest(|end| end.up.delay) + shortest(|end| end.down.delay)) / 100).min(LONGEST_SLACK_NS)
}

/// Where an IPv4 packet goes (RFC 791).
fn destination(packet: &[u8]) -> Option<Ipv4Addr> {
    let header = packet.first_chunk::<20>().filter(|header| header[0] >> 4 == 4)?;
    Some(Ipv4Addr::new(header[16], header[17], header[18], header[19]))
}

fn cpu_s() -> f64 {
    process_cpu_time().map_or(0.0, |time| time.as_secs_f64())
}

/// How long this thread could have run and had no core (the second figure of the kernel's).
fn starved_s() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let ns = text.split_whitespace().nth(1).and_then(|figure| figure.parse::<u64>().ok());
    ns.unwrap_or(0) as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ipv4_has_a_destination() {
        let mut packet = [0; 40];
        packet[0] = 0x45;
        packet[16..20].copy_from_slice(&[10, 77, 0, 2]);
        assert_eq!(destination(&packet), Some(Ipv4Addr::new(10, 77, 0, 2)));
        assert_eq!(destination(&packet[..19]), None);
        packet[0] = 0x60;
        assert_eq!(destination(&packet), None);
        assert_eq!(destination(&[]), None);
    }
}
