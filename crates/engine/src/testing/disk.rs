//! A disk of the simulator: it fills up, fails, is edited behind the engine's back, and loses what wasn't synced when the
//! machine stops.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::disk::{FileId, Files};
use crate::testing::random::Random;

/// The name of a file that isn't the engine's.
const OF_ANOTHER: &str = "notes.txt";

#[derive(Debug)]
struct Inner {
    files: BTreeMap<String, Arc<Vec<u8>>>,
    /// Names of files that are being written.
    unsynced: Vec<String>,
    capacity: u64,
    /// Once in so many calls one fails; 0 is never.
    fail_every: u32,
    random: Random,
}

/// The disk; clones are the same disk, so that it outlives a server.
#[derive(Clone, Debug)]
pub struct SimulatedDisk(Arc<Mutex<Inner>>);

impl SimulatedDisk {
    /// An empty disk of so many bytes, but for a file that isn't the engine's.
    pub fn new(capacity: u64, fail_every: u32, random: Random) -> Self {
        let files = BTreeMap::from([(OF_ANOTHER.to_owned(), Arc::new(vec![7; 5]))]);
        SimulatedDisk(Arc::new(Mutex::new(Inner { files, unsynced: Vec::new(), capacity, fail_every, random })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Others take what is there, or leave it: so many bytes in all from here on.
    pub fn set_capacity(&self, capacity: u64) {
        self.lock().capacity = capacity;
    }

    /// The machine stops: what wasn't synced is there up to some byte, or not at all.
    pub fn crash(&self) {
        let inner = &mut *self.lock();
        for name in inner.unsynced.drain(..) {
            if let Some(file) = inner.files.get_mut(&name) {
                let length = inner.random.between(0, file.len() as u32) as usize;
                Arc::make_mut(file).truncate(length);
            }
        }
    }

    /// Somebody changes a file: a bit, its length, all of it, or its being there. False when there is none.
    pub fn meddle(&self) -> bool {
        let inner = &mut *self.lock();
        let own: Vec<&String> = inner.files.keys().filter(|name| FileId::of_name(name).is_some()).collect();
        if own.is_empty() {
            return false;
        }
        let name = own[inner.random.roll() as usize % own.len()].clone();
        let file = Arc::make_mut(inner.files.get_mut(&name).expect("its name was listed"));
        let length = file.len() as u32;
        match inner.random.between(0, 11) {
            0 => file.truncate(inner.random.between(0, length) as usize),
            1 => file.push(0),
            2 => file.fill(b'#'),
            3 => drop(inner.files.remove(&name)),
            _ if length > 0 => {
                let bit = inner.random.between(0, length * 8 - 1);
                file[bit as usize / 8] ^= 1 << (bit % 8);
            }
            _ => {}
        }
        true
    }

    /// Bytes of the engine's files.
    pub fn own_bytes(&self) -> u64 {
        let inner = self.lock();
        let own = inner.files.iter().filter(|(name, _)| name.as_str() != OF_ANOTHER);
        own.map(|(_, file)| file.len() as u64).sum()
    }

    /// Whether the file that isn't the engine's is as it was.
    pub fn is_other_untouched(&self) -> bool {
        self.lock().files.get(OF_ANOTHER).is_some_and(|file| **file == [7; 5])
    }
}

impl Inner {
    fn used(&self) -> u64 {
        self.files.values().map(|file| file.len() as u64).sum()
    }

    fn may_fail(&mut self) -> io::Result<()> {
        match self.fail_every > 0 && self.random.one_in(self.fail_every) {
            true => Err(io::Error::other("as planned")),
            false => Ok(()),
        }
    }
}

impl Files for SimulatedDisk {
    type Writing = String;
    type Reading = (Arc<Vec<u8>>, usize);

    fn list(&mut self) -> io::Result<Vec<(String, u64)>> {
        Ok(self.lock().files.iter().map(|(name, file)| (name.clone(), file.len() as u64)).collect())
    }

    fn create(&mut self, name: &str) -> io::Result<String> {
        let inner = &mut *self.lock();
        inner.may_fail()?;
        if inner.files.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        inner.files.insert(name.to_owned(), Arc::default());
        inner.unsynced.push(name.to_owned());
        Ok(name.to_owned())
    }

    fn append(&mut self, file: &mut String, bytes: &[u8]) -> io::Result<()> {
        let inner = &mut *self.lock();
        inner.may_fail()?;
        if inner.used() + bytes.len() as u64 > inner.capacity {
            return Err(io::ErrorKind::StorageFull.into());
        }
        match inner.files.get_mut(file) {
            Some(content) => Arc::make_mut(content).extend_from_slice(bytes),
            // A file that was removed goes on without a name.
            None => inner.unsynced.retain(|name| name != file),
        }
        Ok(())
    }

    fn sync(&mut self, file: &mut String) -> io::Result<()> {
        let inner = &mut *self.lock();
        inner.may_fail()?;
        inner.unsynced.retain(|name| name != file);
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let inner = &mut *self.lock();
        inner.may_fail()?;
        let file = inner.files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        inner.files.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        let inner = &mut *self.lock();
        inner.may_fail()?;
        inner.unsynced.retain(|other| other != name);
        inner.files.remove(name).map(|_| ()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn open(&mut self, name: &str) -> io::Result<(Self::Reading, u64)> {
        let inner = &mut *self.lock();
        inner.may_fail()?;
        let file = inner.files.get(name).ok_or(io::ErrorKind::NotFound)?.clone();
        let bytes = file.len() as u64;
        Ok(((file, 0), bytes))
    }

    fn read(&mut self, (file, at): &mut Self::Reading, bytes: &mut [u8]) -> io::Result<()> {
        self.lock().may_fail()?;
        let content = file.get(*at..*at + bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        bytes.copy_from_slice(content);
        *at += bytes.len();
        Ok(())
    }

    fn free_bytes(&mut self) -> io::Result<u64> {
        let inner = self.lock();
        Ok(inner.capacity.saturating_sub(inner.used()))
    }
}
