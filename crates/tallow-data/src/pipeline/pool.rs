//! Worker threads that make samples ahead, and hand them over in order.

use super::{
    HeldBytes,
    fault::{Made, Shared, caught},
    lock,
    samples::Tickets,
};
use crate::error::{Error, Result};
use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::JoinHandle,
};

/// Threads that make samples ahead of the consumer, and how far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workers {
    /// Threads; with 0 the consumer makes each sample when it wants it.
    pub n_threads: usize,
    /// Samples made or in the making.
    pub max_samples: usize,
    /// Their bytes; one sample is always allowed. A sample in the making counts as the largest so far.
    pub max_bytes: u64,
}

impl Workers {
    /// No threads.
    pub const NONE: Self = Self { n_threads: 0, max_samples: 0, max_bytes: 0 };
}

/// Bytes that `workers` hold at most if all samples have `sample_bytes`: made, or in the making. If a
/// sample is larger than all before it, up to `n_threads` times the difference is added.
///
/// What a closure itself needs beside its sample, each thread holds once on top.
pub const fn workers_bytes(workers: Workers, sample_bytes: u64) -> u64 {
    if workers.n_threads == 0 {
        return sample_bytes;
    }
    let by_count = sample_bytes.saturating_mul(workers.max_samples as u64);
    let by_bytes = workers.max_bytes;
    let most = if by_count < by_bytes { by_count } else { by_bytes };
    if most < sample_bytes { sample_bytes } else { most }
}

/// The consumer's end. In order: the next sample is always made or in the making.
pub(crate) struct Pool<T> {
    queue: Arc<Queue<T>>,
    threads: Vec<JoinHandle<()>>,
    shared: Shared,
}

struct Queue<T> {
    /// Locked before `state` where both are. Whoever waits for room holds it.
    tickets: Mutex<Tickets<T>>,
    state: Mutex<State<T>>,
    room: Condvar,
    ready: Condvar,
    limits: Workers,
}

struct State<T> {
    /// One for each sample handed to a worker and not yet to the consumer.
    slots: VecDeque<Option<(Made<T>, u64)>>,
    /// The number of the first of them.
    first: u64,
    held_bytes: u64,
    largest_bytes: Option<u64>,
    n_making: usize,
    /// A worker ended by a panic outside all closures.
    is_dead: bool,
    /// No more tickets, or nobody to make samples for.
    ended: bool,
}

impl<T> State<T> {
    fn has_room(&self, limits: Workers) -> bool {
        if self.slots.is_empty() {
            return true;
        }
        // Until one sample is made, nobody knows how many fit.
        let Some(largest) = self.largest_bytes else { return false };
        let making = largest.saturating_mul(self.n_making as u64 + 1);
        self.slots.len() < limits.max_samples
            && self.held_bytes.saturating_add(making) <= limits.max_bytes
    }
}

impl<T: HeldBytes + Send + 'static> Pool<T> {
    pub(crate) fn start(tickets: Tickets<T>, workers: Workers, shared: Shared) -> Result<Self> {
        let state = State {
            slots: VecDeque::new(),
            first: 0,
            held_bytes: 0,
            largest_bytes: None,
            n_making: 0,
            is_dead: false,
            ended: false,
        };
        let queue = Arc::new(Queue {
            tickets: Mutex::new(tickets),
            state: Mutex::new(state),
            room: Condvar::new(),
            ready: Condvar::new(),
            limits: workers,
        });
        let mut pool = Self { queue, threads: Vec::new(), shared };
        for _ in 0..workers.n_threads {
            let queue = pool.queue.clone();
            let builder = std::thread::Builder::new().name("tallow-data worker".to_owned());
            // On error the pool is dropped, and joins those that were started.
            let thread =
                builder.spawn(move || work(&queue)).map_err(|error| Error::Thread { error })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }
}

/// Tells the consumer of a worker that panics where nothing is caught: it would wait for ever.
struct Alive<'a, T>(&'a Queue<T>);

impl<T> Drop for Alive<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lock(&self.0.state).is_dead = true;
            self.0.ready.notify_all();
        }
    }
}

fn work<T: HeldBytes>(queue: &Queue<T>) {
    let _alive = Alive(queue);
    loop {
        let mut tickets = lock(&queue.tickets);
        let mut state = lock(&queue.state);
        while !state.ended && !state.has_room(queue.limits) {
            state = queue.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended {
            return;
        }
        drop(state);
        // May read from a stream: the consumer can take samples meanwhile.
        let ticket = caught(|| Ok(tickets.next()));
        let mut state = lock(&queue.state);
        if state.ended {
            return; // The consumer left meanwhile.
        }
        let number = state.first + state.slots.len() as u64;
        match ticket {
            Ok(Some(ticket)) => {
                state.slots.push_back(None);
                state.n_making += 1;
                drop((state, tickets));
                let (made, bytes) = ticket.run();
                queue.hand_over(number, made, bytes);
            }
            Ok(None) => {
                state.ended = true;
                queue.ready.notify_all();
                return;
            }
            Err(error) => {
                // The stream itself panicked: its error takes the place of the next sample.
                state.ended = true;
                let made = Made { index: None, position: 0, result: Err(error) };
                state.slots.push_back(Some((made, 0)));
                queue.ready.notify_all();
                return;
            }
        }
    }
}

impl<T> Queue<T> {
    fn hand_over(&self, number: u64, made: Made<T>, bytes: u64) {
        let mut state = lock(&self.state);
        state.n_making -= 1;
        state.held_bytes += bytes;
        // A sample that was left out tells nothing of the size of others.
        if matches!(made.result, Ok(Some(_))) {
            state.largest_bytes = Some(state.largest_bytes.unwrap_or(0).max(bytes));
        }
        // There is no such slot if the consumer has gone.
        let place = number.checked_sub(state.first).map(|place| place as usize);
        if let Some(slot) = place.and_then(|place| state.slots.get_mut(place)) {
            *slot = Some((made, bytes));
        }
        // The consumer waits for the first only.
        if place == Some(0) {
            self.ready.notify_all();
        }
        self.room.notify_all();
    }
}

impl<T> Iterator for Pool<T> {
    type Item = Made<T>;

    fn next(&mut self) -> Option<Made<T>> {
        let mut state = lock(&self.queue.state);
        loop {
            if self.shared.is_stopped() {
                return None;
            }
            if let Some(Some(_)) = state.slots.front() {
                let (made, bytes) = state.slots.pop_front().flatten()?;
                state.first += 1;
                state.held_bytes -= bytes;
                self.queue.room.notify_all();
                return Some(made);
            }
            if state.slots.is_empty() && state.ended {
                return None;
            }
            if state.is_dead {
                state.ended = true;
                return Some(Made { index: None, position: 0, result: Err(Error::DeadWorker) });
            }
            state = self.queue.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        let mut state = lock(&self.queue.state);
        state.ended = true;
        let slots = std::mem::take(&mut state.slots);
        drop(state);
        drop(slots);
        self.queue.room.notify_all();
        for thread in self.threads.drain(..) {
            // A worker that panicked has said so to the consumer.
            let _ = thread.join();
        }
    }
}
