//! Makes a fault happen.

use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rig::sys::now;

use super::fault::Fault;
use super::judge::{Times, ended};
use super::process::{Group, Number};
use super::protocol::{BlockSockets, Command, ErrorReport, Event, Join, SelfFault};
use super::sys;

/// How long a rank may take to say that it has done what it was told.
const SOON: Duration = Duration::from_secs(20);

/// How long a process that comes late may try.
const LATE: Duration = Duration::from_secs(5);

/// A fault that has happened.
#[derive(Clone, Debug, Default)]
pub(crate) struct FaultReport {
    /// When.
    pub(crate) at: u64,
    /// What processes that came late were told.
    pub(crate) refused: Vec<ErrorReport>,
    /// What is wrong with that.
    pub(crate) wrong_newcomer: Option<String>,
    /// How long the victim computes.
    pub(crate) busy_ms: u64,
}

/// Makes `fault` happen to `victim`, which was told to join `like` this.
///
/// # Errors
/// Why it has not happened.
pub(crate) fn fault(
    fault: Fault,
    group: &mut Group,
    victim: Number,
    others: &[Number],
    like: &Join,
    times: &Times,
) -> Result<FaultReport, String> {
    let mut injected = FaultReport { at: now(), ..FaultReport::default() };
    match fault {
        Fault::Kill => sys::signal(group.process_id(victim), libc::SIGKILL),
        Fault::Stop => sys::signal(group.process_id(victim), libc::SIGSTOP),
        Fault::Exit => injected.at = inflict(group, victim, SelfFault::Exit)?,
        Fault::Panic => injected.at = inflict(group, victim, SelfFault::Panic)?,
        Fault::Silent => injected.at = inflict(group, victim, SelfFault::Silent)?,
        Fault::Abort => injected.at = inflict(group, victim, SelfFault::Abort)?,
        Fault::Reset => injected.at = inflict(group, victim, SelfFault::Reset)?,
        Fault::Shutdown => injected.at = inflict(group, victim, SelfFault::Shutdown)?,
        Fault::Busy => {
            injected.busy_ms = u64::try_from((times.liveness + Duration::from_millis(700)).as_millis()).unwrap_or(0);
            injected.at = inflict(group, victim, SelfFault::Busy(injected.busy_ms))?;
        }
        Fault::Cut => injected.at = block(group, victim, others, true)?,
        Fault::HalfOpen => injected.at = block(group, victim, others, false)?,
        Fault::Restart => {
            sys::signal(group.process_id(victim), libc::SIGKILL);
            // The outcome of the late process is not waited for.
            others.iter().for_each(|other| group.tell(*other, &Command::Go));
            injected.meet(group, std::slice::from_ref(like))?;
        }
        Fault::Late => {
            let earlier = Join { epoch: like.epoch.saturating_sub(1), ..like.clone() };
            let foreign = Join { job: "another".into(), ..like.clone() };
            let stranger = Join { secret: secret()?, ..like.clone() };
            injected.meet(group, &[earlier, foreign, stranger])?;
        }
        Fault::Leave => {}
    }
    Ok(injected)
}

impl FaultReport {
    /// Has other processes come as these ranks, one after the other; all must be refused.
    fn meet(&mut self, group: &mut Group, newcomers: &[Join]) -> Result<(), String> {
        for newcomer in newcomers {
            let number = group.start()?;
            group.tell(number, &Command::Join(Box::new(Join { patience: LATE, ..newcomer.clone() })));
            let said = group.hear_each(&[number], Instant::now() + LATE + SOON, ended).remove(0);
            group.kill(number);
            let error = said.and_then(|ended| ended.error);
            match error {
                Some(told) => {
                    if told.kind != "rendezvous" {
                        self.wrong_newcomer = Some(format!("the late process was not refused clearly: {}", told.text));
                    }
                    self.refused.push(told);
                }
                None => self.wrong_newcomer = Some("the late process was admitted, or got no answer".into()),
            }
        }
        Ok(())
    }
}

/// A secret that is not another job's.
///
/// # Errors
/// There is no randomness.
pub(crate) fn secret() -> Result<String, String> {
    let mut bytes = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| format!("/dev/urandom: {error}"))?;
    Ok(comm_core::hex(&bytes))
}

/// Has the victim do something to itself; when it did.
fn inflict(group: &mut Group, victim: Number, what: SelfFault) -> Result<u64, String> {
    group.tell(victim, &Command::Inflict(what));
    let said = group.hear_each(&[victim], Instant::now() + SOON, |event| match event {
        Event::Inflicted { at, error } => Some((*at, error.clone())),
        _ => None,
    });
    match said.into_iter().flatten().next() {
        Some((at, None)) => Ok(at),
        Some((_, Some(why))) => Err(format!("the fault could not be injected: {why}")),
        None => Err(format!("the victim did not confirm the fault: {}", group.complaint(victim))),
    }
}

/// Cuts what the victim hears and what the others hear from it; when that began.
fn block(group: &mut Group, victim: Number, others: &[Number], with_control: bool) -> Result<u64, String> {
    group.tell(victim, &Command::Sockets);
    let said = group.hear_each(&[victim], Instant::now() + SOON, |event| match event {
        Event::Sockets { control, data, udp } => Some((control.clone(), data.clone(), udp.clone())),
        _ => None,
    });
    let (control, data, ports) = said.into_iter().flatten().next().ok_or("the victim does not report its sockets")?;
    if !with_control && data.is_empty() && ports.is_empty() {
        return Err("the victim has no data sockets".into());
    }
    let mut peers: Vec<SocketAddr> = data;
    if with_control {
        peers.extend(control);
    }
    let at = now();
    group.tell(
        victim,
        &Command::BlockSockets(BlockSockets { data: true, control: with_control, ..BlockSockets::default() }),
    );
    for other in others {
        let blocked = BlockSockets { peers: peers.clone(), ports: ports.clone(), ..BlockSockets::default() };
        group.tell(*other, &Command::BlockSockets(blocked));
    }
    let mut all = others.to_vec();
    all.push(victim);
    let said = group.hear_each(&all, Instant::now() + SOON, |event| match event {
        Event::SocketsBlocked { error } => Some(error.clone()),
        _ => None,
    });
    match said.into_iter().find(|said| !matches!(said, Some(None))) {
        None => Ok(at),
        Some(why) => Err(format!("the fault could not be injected: {}", why.flatten().unwrap_or_default())),
    }
}
