//! Contexts of the device, and the streams in them.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::{io, ptr, thread};

use super::Behaviour;

pub(super) type Handle = *mut c_void;
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// One for each rank, as if it were a process. It lives as long as the program, as a device's primary context does.
pub(super) struct Context {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    behaviour: Behaviour,
    /// Jobs of all its streams that have not been done.
    jobs: usize,
}

/// All that were made.
static CONTEXTS: Mutex<Vec<&'static Context>> = Mutex::new(Vec::new());

thread_local! {
    static CURRENT: Cell<Option<&'static Context>> = const { Cell::new(None) };
}

impl Context {
    pub(super) fn new() -> &'static Context {
        let state = Mutex::new(State { behaviour: Behaviour::Works, jobs: 0 });
        let context: &'static Context = Box::leak(Box::new(Context { state, changed: Condvar::new() }));
        lock(&CONTEXTS).push(context);
        context
    }

    /// That of this thread.
    pub(super) fn current() -> Option<&'static Context> {
        CURRENT.get()
    }

    /// The one that a handle stands for; `None` for a handle of something else.
    pub(super) fn of(handle: Handle) -> Option<&'static Context> {
        lock(&CONTEXTS).iter().copied().find(|context| context.handle() == handle)
    }

    pub(super) fn handle(&'static self) -> Handle {
        ptr::from_ref(self).cast_mut().cast()
    }

    /// Makes the one that a handle stands for the current one of this thread, unless it is so already.
    pub(super) fn enter(handle: Handle) -> bool {
        if CURRENT.get().is_none_or(|current| current.handle() != handle) {
            CURRENT.set(Self::of(handle));
        }
        CURRENT.get().is_some()
    }

    pub(super) fn behave(&self, behaviour: Behaviour) {
        lock(&self.state).behaviour = behaviour;
        self.changed.notify_all();
    }

    pub(super) fn is_lost(&self) -> bool {
        lock(&self.state).behaviour == Behaviour::Lost
    }

    pub(super) fn is_busy(&self) -> bool {
        lock(&self.state).jobs > 0
    }

    /// Waits for everything on the device, as freeing its memory does.
    pub(super) fn synchronise(&self) {
        let mut state = lock(&self.state);
        while state.jobs > 0 && state.behaviour != Behaviour::Lost {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Does a job, unless the device does nothing any more.
    fn work(&self, job: Job) {
        let mut state = lock(&self.state);
        while state.behaviour == Behaviour::Hangs {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let is_lost = state.behaviour == Behaviour::Lost;
        drop(state);
        if !is_lost {
            job();
        }
        lock(&self.state).jobs -= 1;
        self.changed.notify_all();
    }
}

/// A thread that does one thing after the other.
pub(super) struct Stream {
    context: &'static Context,
    jobs: Sender<Job>,
}

impl Stream {
    pub(super) fn new(context: &'static Context) -> io::Result<Self> {
        let (jobs, received) = channel::<Job>();
        let work = move || received.into_iter().for_each(|job| context.work(job));
        thread::Builder::new().name("stand-in-stream".into()).spawn(work)?;
        Ok(Stream { context, jobs })
    }

    /// # Safety
    /// `handle` came from `stream_create` and was not destroyed.
    pub(super) unsafe fn of<'a>(handle: Handle) -> &'a Stream {
        // SAFETY: as the caller says.
        unsafe { &*handle.cast::<Stream>() }
    }

    pub(super) fn push(&self, job: Job) {
        let mut state = lock(&self.context.state);
        state.jobs += 1;
        let is_at_once = state.behaviour == Behaviour::AtOnce;
        drop(state);
        if is_at_once {
            return self.context.work(job);
        }
        // The thread ends only after this is dropped.
        let _ = self.jobs.send(job);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
