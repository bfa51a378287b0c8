//! Groups made ahead of the consumer, by one thread.

use super::{
    Flow, HeldBytes, Placed,
    fault::{Shared, caught},
    lock,
};
use crate::error::{Error, Result};
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, PoisonError, atomic::Ordering},
    thread::JoinHandle,
};

/// How far ahead of the consumer groups are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Groups made or in the making, beside the one that the consumer has; 0 is no thread.
    pub n_groups: usize,
    /// Their bytes; one group is always allowed. The one in the making counts as the largest so far.
    pub max_bytes: u64,
}

impl Ahead {
    /// One group, whatever its size.
    pub const ONE: Self = Self { n_groups: 1, max_bytes: u64::MAX };
    /// No thread.
    pub const NONE: Self = Self { n_groups: 0, max_bytes: 0 };
}

/// Bytes of groups that exist at once if all have `group_bytes`: those ahead, and the one that the
/// consumer has. If a group is larger than all before it, the difference is added.
pub const fn ahead_bytes(ahead: Ahead, group_bytes: u64) -> u64 {
    let by_count = group_bytes.saturating_mul(ahead.n_groups as u64);
    let most = if by_count < ahead.max_bytes { by_count } else { ahead.max_bytes };
    let floor = if ahead.n_groups > 0 { group_bytes } else { 0 };
    group_bytes.saturating_add(if most < floor { floor } else { most })
}

pub(crate) struct Prefetch<T> {
    queue: Arc<Queue<T>>,
    thread: Option<JoinHandle<()>>,
    shared: Shared,
}

struct Queue<T> {
    state: Mutex<State<T>>,
    room: Condvar,
    ready: Condvar,
}

struct State<T> {
    made: VecDeque<(Result<Placed<T>>, u64)>,
    held_bytes: u64,
    largest_bytes: u64,
    /// Nothing comes any more, or nobody wants it.
    ended: bool,
}

impl<T: HeldBytes + Send + 'static> Prefetch<T> {
    pub(crate) fn start(groups: Flow<T>, ahead: Ahead, shared: Shared) -> Result<Self> {
        let state = State { made: VecDeque::new(), held_bytes: 0, largest_bytes: 0, ended: false };
        let (room, ready) = (Condvar::new(), Condvar::new());
        let queue = Arc::new(Queue { state: Mutex::new(state), room, ready });
        let builder = std::thread::Builder::new().name("tallow-data prefetch".to_owned());
        let theirs = queue.clone();
        let thread = builder
            .spawn(move || make(groups, &theirs, ahead))
            .map_err(|error| Error::Thread { error })?;
        Ok(Self { queue, thread: Some(thread), shared })
    }
}

/// Tells the consumer that nothing comes any more, however the thread ended.
struct Ended<'a, T>(&'a Queue<T>);

impl<T> Drop for Ended<'_, T> {
    fn drop(&mut self) {
        lock(&self.0.state).ended = true;
        self.0.ready.notify_all();
    }
}

fn make<T: HeldBytes>(mut groups: Flow<T>, queue: &Queue<T>, ahead: Ahead) {
    let _ended = Ended(queue);
    loop {
        // Room first, then the work: what is in the making counts.
        let mut state = lock(&queue.state);
        while !state.ended && !state.has_room(ahead) {
            state = queue.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended {
            return;
        }
        drop(state);
        let group = caught(|| {
            groups
                .next()
                .map(|group| {
                    let group = group?;
                    let bytes = group.value.held_bytes();
                    Ok((group, bytes))
                })
                .transpose()
        });
        let mut state = lock(&queue.state);
        match group {
            Ok(Some((group, bytes))) if !state.ended => {
                state.held_bytes += bytes;
                state.largest_bytes = state.largest_bytes.max(bytes);
                state.made.push_back((Ok(group), bytes));
            }
            Ok(_) => state.ended = true,
            Err(error) => {
                state.ended = true;
                state.made.push_back((Err(error), 0));
            }
        }
        queue.ready.notify_all();
    }
}

impl<T> State<T> {
    fn has_room(&self, ahead: Ahead) -> bool {
        let next = self.held_bytes.saturating_add(self.largest_bytes);
        self.made.is_empty() || (self.made.len() < ahead.n_groups && next <= ahead.max_bytes)
    }
}

impl<T> Iterator for Prefetch<T> {
    type Item = Result<Placed<T>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut state = lock(&self.queue.state);
        loop {
            if let Some((group, bytes)) = state.made.pop_front() {
                state.held_bytes -= bytes;
                self.queue.room.notify_all();
                return Some(group);
            }
            if state.ended {
                return None;
            }
            state = self.queue.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Drop for Prefetch<T> {
    fn drop(&mut self) {
        // What the thread is waiting for ends between two samples.
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut state = lock(&self.queue.state);
        state.ended = true;
        let made = std::mem::take(&mut state.made);
        drop(state);
        drop(made);
        self.queue.room.notify_all();
        if let Some(thread) = self.thread.take() {
            // Its panics were caught and handed over.
            let _ = thread.join();
        }
    }
}
