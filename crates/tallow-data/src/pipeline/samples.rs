use super::{
    Flow, HeldBytes, OnCorrupt, Sampler, Shuffle, Stream, Workers,
    fault::{Made, Namer, Passed, Shared, caught},
    pool::Pool,
};
use crate::{
    batches::Cursor,
    error::{Error, Result},
    rng::Rng,
    source::Source,
};
use std::sync::Arc;

/// Which sample a closure is given, and its random numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Of the run.
    pub seed: u64,
    /// Of the run's epochs, this one.
    pub epoch: u64,
    /// The sample's number in the source.
    pub index: u64,
    /// Which of the pipeline's closures: each has numbers of its own.
    pub stage: u32,
}

impl At {
    /// Random numbers that belong to this sample in this epoch: the same in any thread, order, batch
    /// and rank.
    pub fn rng(&self) -> Rng {
        Rng::keyed(&[self.seed, self.epoch, self.index, u64::from(self.stage)])
    }
}

/// A sample that nobody has made yet.
pub(crate) struct Ticket<T> {
    index: u64,
    position: u64,
    make: Box<dyn FnOnce() -> Result<Option<T>> + Send>,
}

impl<T> Ticket<T> {
    /// Makes it, and says how many bytes it holds; a panic is an error.
    pub(crate) fn run(self) -> (Made<T>, u64)
    where
        T: HeldBytes,
    {
        let Self { index, position, make } = self;
        let made = caught(move || {
            let sample = make()?;
            let bytes = sample.held_bytes();
            Ok((sample, bytes))
        });
        let (result, bytes) = match made {
            Ok((sample, bytes)) => (Ok(sample), bytes),
            Err(error) => (Err(error), 0),
        };
        (Made { index: Some(index), position, result }, bytes)
    }
}

pub(crate) type Tickets<T> = Box<dyn Iterator<Item = Ticket<T>> + Send>;
type Open<T> = Arc<dyn Fn(u64, u64) -> Result<Tickets<T>> + Send + Sync>;

/// Samples in the order of a [`Sampler`], and what is done to each: a description, nothing is read.
///
/// The source and all closures of a sample run in one go, in one of the [`workers`](Samples::workers);
/// results come in order whatever their number.
///
/// *Memory:* what the workers hold, [`workers_bytes`](super::workers_bytes); without workers one sample.
pub struct Samples<T> {
    open: Open<T>,
    name: Namer,
    seed: u64,
    n_stages: u32,
    workers: Workers,
    on_corrupt: OnCorrupt,
}

impl<T> Clone for Samples<T> {
    fn clone(&self) -> Self {
        let (open, name) = (self.open.clone(), self.name.clone());
        Self { open, name, ..*self }
    }
}

impl<T> std::fmt::Debug for Samples<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { seed, n_stages, workers, on_corrupt, .. } = self;
        write!(f, "Samples {{ seed: {seed}, n_stages: {n_stages}, {workers:?}, {on_corrupt:?} }}")
    }
}

impl<T: Send + 'static> Samples<T> {
    /// The samples of a source.
    /// # Errors
    /// If the sampler's rank or window is none.
    pub fn of<S>(source: S, sampler: Sampler) -> Result<Self>
    where
        S: Source<Item = T> + 'static,
    {
        sampler.check()?;
        let source = Arc::new(source);
        let named = source.clone();
        let open = move |epoch, position| -> Result<Tickets<T>> {
            let source = source.clone();
            let indices = sampler.indices(source.n_samples(), epoch, position)?;
            Ok(Box::new(indices.map(move |(index, position)| {
                let source = source.clone();
                Ticket { index, position, make: Box::new(move || source.get(index).map(Some)) }
            })))
        };
        Ok(Self::new(Arc::new(open), Arc::new(move |index| named.name(index)), sampler.seed))
    }

    /// The samples of a stream. With ranks, each reads the whole stream and uses its share.
    /// # Errors
    /// If the sampler's rank or window is none, or it asks for [`Shuffle::Global`].
    pub fn stream<S>(stream: S, sampler: Sampler) -> Result<Self>
    where
        S: Stream<Item = T> + 'static,
    {
        sampler.check()?;
        if sampler.shuffle == Shuffle::Global {
            return Err(Error::GlobalShuffle);
        }
        let stream = Arc::new(stream);
        let named = stream.clone();
        let open = move |epoch, position| -> Result<Tickets<T>> {
            let order = sampler.windowed(epoch, position, |first| {
                Ok(Box::new((first..).zip(stream.open(epoch, first)?)))
            })?;
            Ok(Box::new(order.map(|((index, sample), position)| Ticket {
                index,
                position,
                make: Box::new(move || sample.map(Some)),
            })))
        };
        Ok(Self::new(Arc::new(open), Arc::new(move |index| named.name(index)), sampler.seed))
    }

    fn new(open: Open<T>, name: Namer, seed: u64) -> Self {
        let workers = Workers::NONE;
        Self { open, name, seed, n_stages: 0, workers, on_corrupt: OnCorrupt::Fail }
    }

    /// `f` of every sample.
    pub fn map<U, F>(self, f: F) -> Samples<U>
    where
        U: Send + 'static,
        F: Fn(T, At) -> Result<U> + Send + Sync + 'static,
    {
        self.filter_map(move |sample, at| f(sample, at).map(Some))
    }

    /// The samples for which `keep` is true. Batches are filled up with the next ones.
    pub fn filter<F>(self, keep: F) -> Self
    where
        F: Fn(&T) -> bool + Send + Sync + 'static,
    {
        self.filter_map(move |sample, _| Ok(keep(&sample).then_some(sample)))
    }

    /// `f` of every sample for which it is something.
    pub fn filter_map<U, F>(self, f: F) -> Samples<U>
    where
        U: Send + 'static,
        F: Fn(T, At) -> Result<Option<U>> + Send + Sync + 'static,
    {
        let Self { open, name, seed, n_stages: stage, workers, on_corrupt } = self;
        let f = Arc::new(f);
        let open = move |epoch, position| -> Result<Tickets<U>> {
            let f = f.clone();
            Ok(Box::new(open(epoch, position)?.map(move |ticket| {
                let Ticket { index, position, make } = ticket;
                let at = At { seed, epoch, index, stage };
                let f = f.clone();
                let make = Box::new(move || match make()? {
                    Some(sample) => f(sample, at),
                    None => Ok(None),
                });
                Ticket { index, position, make }
            })))
        };
        Samples { open: Arc::new(open), name, seed, n_stages: stage + 1, workers, on_corrupt }
    }

    /// Makes samples ahead, in threads.
    pub fn workers(self, workers: Workers) -> Self {
        Self { workers, ..self }
    }

    /// What becomes of corrupt samples; [`OnCorrupt::Fail`] if never said.
    pub fn on_corrupt(self, on_corrupt: OnCorrupt) -> Self {
        Self { on_corrupt, ..self }
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// Starts at `cursor`, whose `within` is for what groups the samples.
    pub(crate) fn flow(&self, cursor: Cursor, shared: &Shared) -> Result<Flow<T>>
    where
        T: HeldBytes,
    {
        let tickets = (self.open)(cursor.epoch, cursor.position)?;
        let (name, shared) = (self.name.clone(), shared.clone());
        let (cursor, on_corrupt, ended) = (Cursor { within: 0, ..cursor }, self.on_corrupt, false);
        if self.workers.n_threads == 0 {
            let made = tickets.map(|ticket| ticket.run().0);
            return Ok(Passed { made, cursor, on_corrupt, name, shared, ended }.flow());
        }
        let made = Pool::start(tickets, self.workers, shared.clone())?;
        Ok(Passed { made, cursor, on_corrupt, name, shared, ended }.flow())
    }
}
