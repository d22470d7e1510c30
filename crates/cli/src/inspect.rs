//! Judges a checkpoint without reading its weights: everything that `info` shows and that a start checks first.

use std::collections::BTreeMap;

use tf_checkpoint::{Checkpoint, Dtype, Fingerprint};
use tf_model::deepseek_v41::engram::EngramHash;
use tf_model::deepseek_v41::engram_rows::{EngramPlace, EngramPlaceError};
use tf_model::deepseek_v41::shape::Shape;
use tf_model::deepseek_v41::weights;
use tf_text::chat::Marker;
use tf_text::tokenizer::Tokenizer;
use tf_text::vocabulary::FoldedVocabulary;

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::locate::Located;
use crate::resolve::{self, Loading, LoadingError, Site};

/// What was found. Parts stay empty where an earlier one failed; `reasons` says why.
#[derive(Debug, Default)]
pub struct Inspection {
    pub checkpoint: Option<Checkpoint>,
    pub shape: Option<Shape>,
    pub tokenizer: Option<Tokenizer>,
    pub hash: Option<EngramHash>,
    pub fingerprint: Option<Fingerprint>,
    pub loading: Option<Loading>,
    /// Everything about the files and the machine that keeps it from being served.
    pub reasons: Vec<String>,
    /// Options that it can't be served with.
    pub mistakes: Vec<String>,
}

/// Tensors of one format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    pub tensors: usize,
    pub bytes: u64,
}

impl Inspection {
    /// Opens and checks `located` for the options of `arguments`.
    pub fn of(located: &Located, arguments: &Arguments, site: Site) -> Inspection {
        let mut found = Inspection::default();
        match located.open() {
            Ok(checkpoint) => found.checkpoint = Some(checkpoint),
            Err(error) => found.reasons.extend(error.reasons()),
        }
        found.read_shape(located);
        found.read_tokenizer(located);
        if let (Some(checkpoint), Some(shape)) = (&found.checkpoint, &found.shape) {
            if let Err(error) = weights::bind(shape, checkpoint) {
                found.reasons.extend(error.reasons());
            }
            match checkpoint.fingerprint() {
                Ok(fingerprint) => found.fingerprint = Some(fingerprint),
                Err(error) => found.reasons.extend(error.reasons()),
            }
        }
        if let Some(shape) = &found.shape {
            match resolve::loading(arguments, shape, site) {
                Ok(loading) => found.loading = Some(loading),
                Err(LoadingError::Usage(mistakes)) => found.mistakes.extend(mistakes.0),
                Err(room @ LoadingError::Room { .. }) => found.reasons.push(room.to_string()),
            }
        }
        found.check_place();
        found
    }

    /// Whether n-gram rows can be where they are wanted.
    fn check_place(&mut self) {
        let (Some(checkpoint), Some(loading)) = (&self.checkpoint, &self.loading) else { return };
        if matches!(loading.engram, EngramPlace::Disk { .. }) && checkpoint.path().is_none() {
            self.mistakes.push(EngramPlaceError::NoFile.to_string());
        }
    }

    /// What keeps it from being served: 2 where the options do, else 1.
    pub fn failure(&self) -> Option<Failure> {
        let code = if self.mistakes.is_empty() { 1 } else { 2 };
        let text: Vec<&str> = self.all_reasons().collect();
        (!text.is_empty()).then(|| Failure { code, text: text.join("\n") })
    }

    /// Everything that keeps it from being served.
    pub fn all_reasons(&self) -> impl Iterator<Item = &str> {
        self.mistakes.iter().chain(&self.reasons).map(String::as_str)
    }

    fn read_shape(&mut self, located: &Located) {
        match located.small_files().and_then(|files| files.config()) {
            Ok(config) => match Shape::from_config(&config) {
                Ok(shape) => self.shape = Some(shape),
                Err(error) => self.reasons.extend(error.reasons()),
            },
            Err(error) => self.reasons.extend(error.reasons()),
        }
    }

    /// The tokenizer, and whether it belongs to the configuration.
    fn read_tokenizer(&mut self, located: &Located) {
        let bytes = match located.small_files().and_then(|files| files.required_file("tokenizer.json")) {
            Ok(bytes) => bytes,
            Err(error) => return self.reasons.extend(error.reasons()),
        };
        let tokenizer = match Tokenizer::from_bytes(&bytes) {
            Ok(tokenizer) => tokenizer,
            Err(error) => return self.reasons.push(error.to_string()),
        };
        if let Some(shape) = &self.shape {
            let (found, expected) = (tokenizer.vocab_size(), shape.vocab_size);
            if found != expected {
                self.reasons.push(format!(
                    "tokenizer.json has {found} ids, config.json's vocab_size is {expected}: they don't belong together. \
                     Fetch both again"
                ));
            } else {
                for (marker, name, expected) in [
                    (Marker::BeginOfSentence, "bos_token_id", Some(shape.bos_token_id)),
                    (Marker::EndOfSentence, "eos_token_id", Some(shape.eos_token_id)),
                    (Marker::Image, "image_token_id", shape.image_token_id),
                ] {
                    let found = tokenizer.markers().id(marker);
                    if let Some(expected) = expected.filter(|expected| *expected != found) {
                        self.reasons.push(format!(
                            "tokenizer.json gives {} the id {found}, config.json's {name} is {expected}: they don't belong \
                             together. Fetch both again",
                            marker.spelling()
                        ));
                    }
                }
                let hash = FoldedVocabulary::build(&tokenizer).map_err(|error| error.to_string());
                let hash =
                    hash.and_then(|folded| EngramHash::new(shape, folded.map).map_err(|error| error.to_string()));
                match hash {
                    Ok(hash) => self.hash = Some(hash),
                    Err(reason) => self.reasons.push(reason),
                }
            }
        }
        self.tokenizer = Some(tokenizer);
    }

    /// Tensors by format.
    pub fn formats(&self) -> BTreeMap<Dtype, Stored> {
        let mut formats: BTreeMap<Dtype, Stored> = BTreeMap::new();
        for view in self.checkpoint.iter().flat_map(Checkpoint::views) {
            let stored = formats.entry(view.dtype).or_default();
            stored.tensors += 1;
            stored.bytes += view.bytes.len() as u64;
        }
        formats
    }

    /// Markers of the chat format with their ids.
    pub fn markers(&self) -> Vec<(&'static str, u32)> {
        let Some(tokenizer) = &self.tokenizer else { return Vec::new() };
        Marker::ALL.into_iter().map(|marker| (marker.spelling(), tokenizer.markers().id(marker))).collect()
    }
}
