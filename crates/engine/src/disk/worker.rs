//! The slow half of the disk tier: writes, reads and removes files as it is told, one order after the other.
//!
//! A file gets its name only when all of it is on the disk, so a name is a promise; the checksums find what broke it.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};

use sha2::{Digest, Sha256};

use super::files::Files;
use super::format::{CHECKSUM_BYTES, Checksum, FIXED_BYTES, FileId, Header, body_digest, decode, judge};
use super::{DiskEvent, DiskIdentity, DiskLimits, ORDERS_MAX, PIECE_BYTES, Refusal, Report};

/// Names a load for as long as the engine lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoadId(pub u64);

/// What is read of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub id: FileId,
    /// The checksum of its header, as it was when the file was found or written.
    pub checksum: Checksum,
    pub wants_state: bool,
    /// Pages that are wanted, counted from the prefix's start.
    pub pages: Range<u32>,
}

/// What the worker is asked to do.
#[derive(Clone, Debug)]
pub enum Order {
    /// A file begins; its state and pages follow as pieces.
    Begin(FileId, Header),
    Piece(Vec<u8>),
    /// All pieces were sent.
    End,
    /// The file that began isn't wanted any more.
    Abandon,
    Remove(FileId),
    /// Reads these parts and brings the first piece.
    Load(LoadId, Vec<Part>),
    /// Brings the next piece of a load.
    More(LoadId),
    Forget(LoadId),
    /// Nothing follows.
    Close,
}

/// What the worker has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// An order was taken, so that another one may be sent.
    Room,
    Written(FileId, Checksum),
    /// The disk didn't take it; where for want of room, how many bytes others hold of what shall stay free.
    NotWritten(FileId, Option<u64>),
    State(LoadId, Vec<u8>),
    /// Contents of pages from this one on.
    Pages(LoadId, u32, Vec<u8>),
    /// Everything was brought and every checksum was right.
    Loaded(LoadId),
    /// This file can't be used.
    NotLoaded(LoadId, FileId, Refusal),
    /// Everything before [`Order::Close`] is done.
    Closed,
}

/// Where news go.
pub type Sink = Arc<dyn Fn(News) + Send + Sync>;

/// A file that was found at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub id: FileId,
    pub header: Header,
    pub checksum: Checksum,
}

/// A directory that was opened and looked through.
pub struct Disk<F> {
    pub(super) files: F,
    pub(super) limits: DiskLimits,
    pub(super) identity: DiskIdentity,
    pub(super) report: Report,
    /// Usable as far as headers say, older ones first.
    pub(super) found: Vec<Found>,
    /// Of other builds or checkpoints, with their lengths.
    pub(super) stale: Vec<(FileId, u64)>,
    pub(super) next_id: u64,
    pub(super) refused: [u64; Refusal::ALL.len()],
    /// A planted defect: contents are used whatever their checksums say.
    pub(super) trusts_all: bool,
}

impl<F: Files> Disk<F> {
    /// Looks through all files: headers are checked here, contents when they are read.
    ///
    /// # Errors
    /// When the directory can't be listed.
    pub fn new(mut files: F, limits: DiskLimits, identity: DiskIdentity, report: Report) -> io::Result<Self> {
        let mut listed: Vec<(FileId, bool, u64)> = (files.list()?.into_iter())
            .filter_map(|(name, bytes)| FileId::of_name(&name).map(|(id, is_partial)| (id, is_partial, bytes)))
            .collect();
        listed.sort_unstable();
        let next_id = listed.last().map_or(0, |(id, ..)| id.0).saturating_add(1);
        let (found, stale, refused) = (Vec::new(), Vec::new(), [0; Refusal::ALL.len()]);
        let mut disk = Disk { files, limits, identity, report, found, stale, next_id, refused, trusts_all: false };
        for (id, is_partial, bytes) in listed {
            disk.look_at(id, is_partial, bytes);
        }
        disk.drop_orphans();
        Ok(disk)
    }

    /// Files that may be used.
    pub fn file_count(&self) -> usize {
        self.found.len()
    }

    /// With a planted defect: nothing but lengths is checked when a file is read.
    pub fn trusting_all(mut self) -> Self {
        self.trusts_all = true;
        self
    }

    fn look_at(&mut self, id: FileId, is_partial: bool, bytes: u64) {
        if is_partial {
            self.refuse(&id.partial_name(), Refusal::Damaged, "it was never finished");
            return;
        }
        let name = id.name();
        match read_header(&mut self.files, &name, self.identity) {
            Ok((_, header, checksum)) => self.found.push(Found { id, header, checksum }),
            Err((Refusal::Stale, why)) => {
                self.stale.push((id, bytes));
                self.refuse(&name, Refusal::Stale, &why);
            }
            Err((reason, why)) => self.refuse(&name, reason, &why),
        }
    }

    /// Files whose pages are not all there are of no use.
    fn drop_orphans(&mut self) {
        let mut whole: BTreeMap<FileId, Header> = BTreeMap::new();
        let mut prefixes = HashSet::new();
        for found in std::mem::take(&mut self.found) {
            let header = &found.header;
            let base = header.base.and_then(|base| whole.get(&base));
            let is_based = header.first_page == 0 || base.is_some_and(|base| header.builds_on(base));
            let name = found.id.name();
            if !is_based {
                self.refuse(&name, Refusal::Orphan, "the file that it builds on is not there");
            } else if prefixes.insert(header.tokens.clone()) {
                whole.insert(found.id, found.header.clone());
                self.found.push(found);
            } else {
                // The same prefix twice: the older one serves.
                let _ = self.files.remove(&name);
            }
        }
    }

    fn refuse(&mut self, name: &str, reason: Refusal, why: &str) {
        self.refused[reason.index()] += 1;
        refuse(&mut self.files, &self.report, name, reason, why);
    }

    /// Two workers and the ways to them: the first writes and removes, the second reads. What was found is left behind.
    pub(super) fn connect(self, sink: &Sink) -> ([SyncSender<Order>; 2], [Worker<F>; 2]) {
        let worker = || {
            let (sender, orders) = sync_channel(ORDERS_MAX);
            let worker = Worker {
                files: self.files.clone(),
                min_free_bytes: self.limits.min_free_bytes,
                identity: self.identity,
                report: self.report.clone(),
                orders,
                sink: sink.clone(),
                writing: None,
                readings: Vec::new(),
                is_failing: false,
                trusts_all: self.trusts_all,
            };
            (sender, worker)
        };
        let ((writes, writer), (reads, reader)) = (worker(), worker());
        ([writes, reads], [writer, reader])
    }
}

/// Says why a file isn't used, and removes it where it is ours and can serve nobody.
fn refuse<F: Files>(files: &mut F, report: &Report, name: &str, reason: Refusal, why: &str) {
    report(DiskEvent::Refused { file: name.to_owned(), reason, why: why.to_owned() });
    if matches!(reason, Refusal::Damaged | Refusal::Orphan) {
        // A file that can't be removed is refused again at the next start.
        let _ = files.remove(name);
    }
}

type Opened<F> = (<F as Files>::Reading, Header, Checksum);

fn read_header<F: Files>(files: &mut F, name: &str, identity: DiskIdentity) -> Result<Opened<F>, (Refusal, String)> {
    let unreadable = |error: io::Error| (Refusal::Unreadable, error.to_string());
    let (mut file, bytes) = files.open(name).map_err(unreadable)?;
    if bytes < FIXED_BYTES as u64 {
        return Err((Refusal::Damaged, format!("it has {bytes} bytes, a header has {FIXED_BYTES} or more")));
    }
    let mut fixed = [0; FIXED_BYTES];
    files.read(&mut file, &mut fixed).map_err(unreadable)?;
    let token_count = judge(&fixed, bytes, identity)?.token_count;
    let mut header = fixed.to_vec();
    header.resize(Header::header_bytes(token_count) as usize, 0);
    files.read(&mut file, &mut header[FIXED_BYTES..]).map_err(unreadable)?;
    let (header, checksum) = decode(&header)?;
    Ok((file, header, checksum))
}

struct Writing<W> {
    id: FileId,
    /// `None` once it failed; what still comes is dropped.
    file: Option<(W, Sha256)>,
    checksum: Checksum,
}

struct Reading<R> {
    load: LoadId,
    parts: VecDeque<Part>,
    open: Option<Open<R>>,
}

struct Open<R> {
    part: Part,
    file: R,
    header: Header,
    digest: Sha256,
    /// `None` while the state is still to be read; then the next page.
    next_page: Option<u32>,
}

/// Does the orders. See the module's text.
pub struct Worker<F: Files> {
    files: F,
    min_free_bytes: u64,
    identity: DiskIdentity,
    report: Report,
    orders: Receiver<Order>,
    sink: Sink,
    writing: Option<Writing<F::Writing>>,
    readings: Vec<Reading<F::Reading>>,
    /// The last write failed; the next failure isn't said again.
    is_failing: bool,
    trusts_all: bool,
}

impl<F: Files> Worker<F> {
    /// Works until it is closed or nobody can give orders any more.
    pub fn run(mut self) {
        while let Ok(order) = self.orders.recv() {
            (self.sink)(News::Room);
            if !self.obey(order) {
                return;
            }
        }
        self.abandon();
    }

    /// Does the next order, if there is one; false when there is none.
    pub fn step(&mut self) -> bool {
        match self.orders.try_recv() {
            Ok(order) => {
                (self.sink)(News::Room);
                self.obey(order);
                true
            }
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => false,
        }
    }

    fn obey(&mut self, order: Order) -> bool {
        match order {
            Order::Begin(id, header) => self.begin(id, &header),
            Order::Piece(bytes) => self.piece(&bytes),
            Order::End => self.end(),
            Order::Abandon => self.abandon(),
            Order::Remove(id) => {
                // What is gone already needs no removal; what can't be removed is found again at the next start.
                let _ = self.files.remove(&id.name());
            }
            Order::Load(load, parts) => {
                self.readings.push(Reading { load, parts: parts.into(), open: None });
                self.bring(load);
            }
            Order::More(load) => self.bring(load),
            Order::Forget(load) => self.readings.retain(|reading| reading.load != load),
            Order::Close => {
                self.abandon();
                (self.sink)(News::Closed);
                return false;
            }
        }
        true
    }

    fn begin(&mut self, id: FileId, header: &Header) {
        self.abandon();
        let began = self.begin_file(id, header);
        let (file, checksum) = match began {
            Ok((file, checksum)) => (Some((file, body_digest(&checksum))), checksum),
            Err(error) => {
                self.write_failed(id, &error);
                (None, [0; CHECKSUM_BYTES])
            }
        };
        self.writing = Some(Writing { id, file, checksum });
    }

    fn begin_file(&mut self, id: FileId, header: &Header) -> io::Result<(F::Writing, Checksum)> {
        let free = self.files.free_bytes()?;
        if free.saturating_sub(header.file_bytes()) < self.min_free_bytes {
            let text = format!("{free} bytes are free on the disk, {} shall stay free", self.min_free_bytes);
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
        let mut file = self.files.create(&id.partial_name())?;
        let bytes = header.encode();
        self.files.append(&mut file, &bytes)?;
        let mut checksum = [0; CHECKSUM_BYTES];
        checksum.copy_from_slice(&bytes[bytes.len() - CHECKSUM_BYTES..]);
        Ok((file, checksum))
    }

    fn piece(&mut self, bytes: &[u8]) {
        let Some(Writing { id, file: Some((file, digest)), .. }) = &mut self.writing else { return };
        digest.update(bytes);
        if let Err(error) = self.files.append(file, bytes) {
            let id = *id;
            self.write_failed(id, &error);
        }
    }

    fn end(&mut self) {
        let Some(Writing { id, file: Some((mut file, digest)), checksum }) = self.writing.take() else { return };
        let trailer: Checksum = digest.finalize().into();
        let written = (self.files.append(&mut file, &trailer))
            .and_then(|()| self.files.sync(&mut file))
            .and_then(|()| self.files.rename(&id.partial_name(), &id.name()));
        match written {
            Ok(()) => {
                self.is_failing = false;
                (self.sink)(News::Written(id, checksum));
            }
            Err(error) => self.write_failed(id, &error),
        }
    }

    fn abandon(&mut self) {
        if let Some(Writing { id, file: Some(_), .. }) = self.writing.take() {
            let _ = self.files.remove(&id.partial_name());
        }
    }

    fn write_failed(&mut self, id: FileId, error: &io::Error) {
        let _ = self.files.remove(&id.partial_name());
        if let Some(writing) = &mut self.writing {
            writing.file = None;
        }
        if !self.is_failing {
            (self.report)(DiskEvent::NotWritten { file: id.name(), why: error.to_string() });
        }
        self.is_failing = true;
        let is_full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
        let least = self.min_free_bytes;
        let held_by_others = is_full.then(|| least.saturating_sub(self.files.free_bytes().unwrap_or(least)));
        (self.sink)(News::NotWritten(id, held_by_others));
    }

    /// Brings one piece of a load, or its end.
    fn bring(&mut self, load: LoadId) {
        let Some(index) = self.readings.iter().position(|reading| reading.load == load) else { return };
        match self.next_piece(index) {
            Ok(Some(news)) => (self.sink)(news),
            Ok(None) => {
                self.readings.remove(index);
                (self.sink)(News::Loaded(load));
            }
            Err((id, reason, why)) => {
                self.readings.remove(index);
                refuse(&mut self.files, &self.report, &id.name(), reason, &why);
                (self.sink)(News::NotLoaded(load, id, reason));
            }
        }
    }

    fn next_piece(&mut self, index: usize) -> Result<Option<News>, (FileId, Refusal, String)> {
        let reading = &mut self.readings[index];
        loop {
            let mut open = match reading.open.take() {
                Some(open) => open,
                None => match reading.parts.pop_front() {
                    Some(part) => {
                        let id = part.id;
                        let opened = open_part(&mut self.files, part, self.identity, self.trusts_all);
                        opened.map_err(|(reason, why)| (id, reason, why))?
                    }
                    None => return Ok(None),
                },
            };
            let id = open.part.id;
            let piece = read_piece(&mut self.files, &mut open, self.trusts_all);
            match piece.map_err(|(reason, why)| (id, reason, why))? {
                Piece::State(bytes) if open.part.wants_state => {
                    reading.open = Some(open);
                    return Ok(Some(News::State(reading.load, bytes)));
                }
                Piece::Pages(first, bytes) => {
                    reading.open = Some(open);
                    return Ok(Some(News::Pages(reading.load, first, bytes)));
                }
                Piece::State(_) | Piece::Passed => reading.open = Some(open),
                Piece::End => {}
            }
        }
    }
}

fn open_part<F: Files>(
    files: &mut F,
    part: Part,
    identity: DiskIdentity,
    trusts_all: bool,
) -> Result<Open<F::Reading>, (Refusal, String)> {
    let (file, header, checksum) = read_header(files, &part.id.name(), identity)?;
    if checksum != part.checksum && !trusts_all {
        return Err((Refusal::Damaged, "it is another file than the one that was found".to_owned()));
    }
    Ok(Open { part, file, header, digest: body_digest(&checksum), next_page: None })
}

enum Piece {
    State(Vec<u8>),
    Pages(u32, Vec<u8>),
    /// Pages that nobody asked for.
    Passed,
    End,
}

/// Reads on in one file: the state, then pages a piece at a time, then the checksum over it all.
fn read_piece<F: Files>(
    files: &mut F,
    open: &mut Open<F::Reading>,
    trusts_all: bool,
) -> Result<Piece, (Refusal, String)> {
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => (Refusal::Damaged, "it ends too soon".to_owned()),
        _ => (Refusal::Unreadable, error.to_string()),
    };
    let header = &open.header;
    let Some(page) = open.next_page else {
        let mut bytes = vec![0; header.state_bytes as usize];
        files.read(&mut open.file, &mut bytes).map_err(unreadable)?;
        open.digest.update(&bytes);
        open.next_page = Some(header.first_page);
        return Ok(Piece::State(bytes));
    };
    if page == header.pages_end() {
        let mut claimed = [0; CHECKSUM_BYTES];
        files.read(&mut open.file, &mut claimed).map_err(unreadable)?;
        let checksum: Checksum = open.digest.clone().finalize().into();
        return match checksum == claimed || trusts_all {
            true => Ok(Piece::End),
            false => Err((Refusal::Damaged, "the checksum of its contents differs".to_owned())),
        };
    }
    // A piece never crosses the border between wanted and passed pages.
    let wanted = &open.part.pages;
    let borders = [wanted.start, wanted.end, header.pages_end()];
    let border = borders.into_iter().filter(|&border| border > page).min().unwrap_or(header.pages_end());
    let most = (PIECE_BYTES / u64::from(header.page_bytes.max(1))).clamp(1, u64::from(u32::MAX)) as u32;
    let end = border.min(page.saturating_add(most)).min(header.pages_end());
    let mut bytes = vec![0; (end - page) as usize * header.page_bytes as usize];
    files.read(&mut open.file, &mut bytes).map_err(unreadable)?;
    open.digest.update(&bytes);
    open.next_page = Some(end);
    Ok(if wanted.contains(&page) { Piece::Pages(page, bytes) } else { Piece::Passed })
}
