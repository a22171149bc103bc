//! What can happen to a rank, and what the others must make of it.

use std::time::Duration;

use isocomm::{Medium, TransportKind};
use serde::{Deserialize, Serialize};

use super::protocol::ErrorReport;
use super::sys::may_filter_sockets;
use super::when::When;

/// What happens to the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT after the others have ended.
    Stop,
    /// It ends with exit code 0 without leaving the job.
    Exit,
    /// Its main thread panics between two operations.
    Panic,
    /// It keeps running, but does not call the next operation.
    Silent,
    /// All its connections are silently cut: nothing arrives, and no error is reported.
    Cut,
    /// Only its data connections are silently cut.
    HalfOpen,
    /// Its data sockets are reset.
    Reset,
    /// Its data connections are closed in its sending direction, without a reset.
    Shutdown,
    /// It aborts the job.
    Abort,
    /// SIGKILL, and at once another process connects with the same rank and epoch.
    Restart,
    /// Processes of the previous epoch, of another job, and with a wrong secret connect.
    Late,
    /// It computes for longer than the liveness bound, while more threads than cores compute.
    Busy,
    /// No fault: it sends its last message, finishes, and ends at once.
    Leave,
}

comm_core::names!(
    pub(crate) Fault, "fault":
    Kill = "kill",
    Stop = "stop",
    Exit = "exit",
    Panic = "panic",
    Silent = "silent",
    Cut = "cut",
    HalfOpen = "half-open",
    Reset = "reset",
    Shutdown = "shutdown",
    Abort = "abort",
    Restart = "restart",
    Late = "late",
    Busy = "busy",
    Leave = "leave",
);

impl Fault {
    /// Whether it is also injected on rank 0, over which the ranks learn of each other.
    pub(crate) fn concerns_rank_zero(self) -> bool {
        matches!(self, Fault::Kill | Fault::Stop | Fault::Exit | Fault::Cut)
    }

    /// Whether the victim's process ends by it.
    pub(crate) fn ends_process(self) -> bool {
        matches!(self, Fault::Kill | Fault::Exit | Fault::Panic | Fault::Restart)
    }

    /// Whether the job goes on and ends well.
    pub(crate) fn is_harmless(self) -> bool {
        matches!(self, Fault::Late | Fault::Busy | Fault::Leave)
    }

    /// Whether most of the time until it is noticed is spent waiting.
    pub(crate) fn is_slow(self) -> bool {
        matches!(self, Fault::Stop | Fault::Silent | Fault::Cut | Fault::HalfOpen)
    }

    /// Why it makes no sense there; `None` where it does.
    pub(crate) fn not_applicable(self, transport: TransportKind, when: When) -> Option<&'static str> {
        if matches!(self, Fault::Cut | Fault::HalfOpen) && !may_filter_sockets() {
            return Some("only root may put filters on sockets on this system; run as root");
        }
        match (self, transport.medium()) {
            (Fault::HalfOpen | Fault::Reset | Fault::Shutdown, Medium::SharedMemory) => {
                return Some("shared memory has no connections");
            }
            (Fault::Shutdown, Medium::Udp) => return Some("a UDP socket has no stream that could end"),
            _ => {}
        }
        match (self, when) {
            (Fault::HalfOpen | Fault::Reset | Fault::Shutdown, When::Connect) => {
                Some("data connections do not exist yet")
            }
            (Fault::Abort, When::Connect) => Some("the communicator does not exist yet"),
            (Fault::Restart, When::Connect) => {
                Some("the other ranks end at once, so none is left to refuse the late process")
            }
            (Fault::Late, When::Connect | When::Before | When::Last) => {
                Some("a refused process does not depend on what the others do; tested during operations only")
            }
            (Fault::Busy, When::Connect | When::Before | When::Last) => {
                Some("the same as `during`, where the fault comes between two operations")
            }
            (Fault::Leave, When::Connect | When::Before | When::During) => {
                Some("a rank leaves only after its last operation")
            }
            _ => None,
        }
    }

    /// By when every survivor must have ended, from the fault's moment.
    pub(crate) fn bound(self, transport: TransportKind, liveness: Duration, timeout: Duration) -> Duration {
        let second = Duration::from_secs(1);
        match self {
            Fault::Kill | Fault::Exit | Fault::Panic | Fault::Restart | Fault::Abort | Fault::Shutdown => second,
            // A datagram to a closed UDP socket is lost like any other.
            Fault::Reset if transport.medium() == Medium::Udp => timeout + second,
            Fault::Reset => second,
            Fault::Stop | Fault::Cut => liveness + second,
            Fault::Silent | Fault::HalfOpen => timeout + second,
            // The whole run, of which these are a part.
            Fault::Late | Fault::Leave => Duration::from_secs(20),
            Fault::Busy => 2 * liveness + Duration::from_secs(20),
        }
    }

    /// What is wrong with what a survivor says of a fault of `victim`; `None` if it is right.
    pub(crate) fn objection(self, victim: usize, said: Option<&ErrorReport>) -> Option<String> {
        let Some(told) = said else {
            return (!self.is_harmless()).then(|| "ended without an error".to_string());
        };
        let kinds: &[&str] = match self {
            Fault::Late | Fault::Busy | Fault::Leave => return Some(format!("failed: {}", told.text)),
            Fault::Kill | Fault::Stop | Fault::Exit | Fault::Panic | Fault::Cut | Fault::Restart => &["peer-lost"],
            Fault::Silent => &["timeout"],
            Fault::HalfOpen => &["timeout", "peer-lost"],
            Fault::Reset | Fault::Shutdown => &["peer-lost", "timeout"],
            Fault::Abort => &["aborted"],
        };
        if !kinds.contains(&told.kind.as_str()) {
            return Some(format!("reported {} instead of {}: {}", told.kind, kinds.join(" or "), told.text));
        }
        (!self.breaks_pairs() && !told.names().contains(&victim))
            .then(|| format!("does not name rank {victim}: {}", told.text))
    }

    /// Where connections broke: what a survivor says that names neither the victim nor comes from it. Every rank is an end of a
    /// connection that broke, so this is not wrong, but it points at two ranks between which all is well.
    pub(crate) fn remark(self, victim: usize, said: Option<&ErrorReport>) -> Option<String> {
        let told = said.filter(|_| self.breaks_pairs())?;
        let may_come_from_it = told.kind == "peer-lost" || told.by == Some(victim);
        (!told.names().contains(&victim) && !may_come_from_it).then(|| told.text.clone())
    }

    /// Whether connections break while both processes live, so that neither end is more to blame than the other.
    pub(crate) fn breaks_pairs(self) -> bool {
        matches!(self, Fault::HalfOpen | Fault::Reset | Fault::Shutdown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(kind: &str, culprit: Option<usize>, by: Option<usize>, waiting_for: &[usize]) -> ErrorReport {
        ErrorReport { kind: kind.into(), culprit, by, waiting_for: waiting_for.to_vec(), text: "text".into() }
    }

    #[test]
    fn names_read_as_they_print() {
        for fault in Fault::ALL {
            assert_eq!(fault.to_string().parse::<Fault>(), Ok(fault));
        }
        for when in When::ALL {
            assert_eq!(when.to_string().parse::<When>(), Ok(when));
        }
        assert!("hiccup".parse::<Fault>().unwrap_err().to_string().contains("half-open"));
    }

    #[test]
    fn the_wrong_rank_the_wrong_kind_and_no_error_at_all_are_objected_to() {
        let lost = |rank| told("peer-lost", Some(rank), None, &[]);
        assert_eq!(Fault::Kill.objection(1, Some(&lost(1))), None);
        assert!(Fault::Kill.objection(1, Some(&lost(0))).is_some());
        assert!(Fault::Kill.objection(1, None).is_some());
        assert!(Fault::Kill.objection(1, Some(&told("timeout", None, Some(0), &[1]))).is_some());
        assert_eq!(Fault::Silent.objection(1, Some(&told("timeout", None, Some(0), &[1, 2]))), None);
        assert!(Fault::Silent.objection(1, Some(&told("timeout", None, Some(0), &[2]))).is_some());
        // One end of a broken pair.
        assert_eq!(Fault::HalfOpen.objection(1, Some(&told("timeout", None, Some(1), &[0]))), None);
        let beside = told("timeout", None, Some(0), &[2]);
        assert_eq!(Fault::HalfOpen.objection(1, Some(&beside)), None);
        assert!(Fault::HalfOpen.remark(1, Some(&beside)).is_some());
        assert_eq!(Fault::HalfOpen.remark(1, Some(&told("timeout", None, Some(0), &[1]))), None);
        assert_eq!(Fault::Silent.remark(1, Some(&beside)), None);
        assert_eq!(Fault::Reset.objection(1, Some(&lost(0))), None);
        assert_eq!(Fault::Late.objection(1, None), None);
        assert!(Fault::Late.objection(1, Some(&lost(1))).is_some());
    }
}
