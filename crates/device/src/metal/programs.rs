//! Libraries and pipelines: compiled on first use from the families' sources, in safe math mode, and kept on disk.

use super::system::DeviceObject;
use crate::apple::archive::{Key, Made, Settling, Shelf};
use crate::gpu::Program;
use objc2::AnyThread;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSArray, NSString, NSURL};
use objc2_metal::{
    MTLBinaryArchive, MTLBinaryArchiveDescriptor, MTLCompileOptions, MTLComputePipelineDescriptor,
    MTLComputePipelineState, MTLDevice, MTLFunction, MTLLanguageVersion, MTLLibrary, MTLMathMode, MTLPipelineOption,
};
use std::collections::HashMap;
use std::path::Path;

pub(super) type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;
type Library = Retained<ProtocolObject<dyn MTLLibrary>>;
type Archive = Retained<ProtocolObject<dyn MTLBinaryArchive>>;

/// What [`Made::settings`] says of the options below.
const SETTINGS: &str = "msl 3.1, safe math";

/// Where compiled pipelines are kept.
pub(super) struct Kept {
    pub shelf: Shelf,
    /// The build of the system.
    pub system: String,
}

/// The programs of a device.
pub(super) struct Programs {
    device: DeviceObject,
    target: String,
    kept: Option<Kept>,
    /// By the address of the program, which is a static.
    libraries: HashMap<usize, Built>,
    pipelines: HashMap<(usize, &'static str), Pipeline>,
    settling: Settling,
    /// A source in place of another one, for controls of the kernel contract.
    edit: Option<(&'static str, String)>,
}

struct Built {
    name: &'static str,
    library: Library,
    key: Key,
    /// `None` where nothing is kept.
    archive: Option<Archive>,
    /// Something was added that is not on disk.
    is_fresh: bool,
}

/// Why there is no pipeline.
pub(super) enum Missing {
    /// The program has no such entry.
    Entry,
    /// The source does not compile.
    Failed(String),
    /// The compiled kernel is not taken.
    Refused(String),
}

fn failed(error: impl std::fmt::Display) -> Missing {
    Missing::Failed(error.to_string())
}

fn refused(error: impl std::fmt::Display) -> Missing {
    Missing::Refused(error.to_string())
}

impl Programs {
    /// Nothing compiled.
    pub fn new(
        device: DeviceObject,
        target: String,
        kept: Option<Kept>,
        edit: Option<(&'static str, String)>,
    ) -> Programs {
        // What is edited is not kept.
        let kept = kept.filter(|_| edit.is_none());
        let (libraries, pipelines) = (HashMap::new(), HashMap::new());
        Programs { device, target, kept, libraries, pipelines, settling: Settling::default(), edit }
    }

    /// The pipeline of an entry.
    pub fn pipeline(&mut self, program: &'static Program, entry: &'static str) -> Result<Pipeline, Missing> {
        let at = std::ptr::from_ref(program) as usize;
        if let Some(pipeline) = self.pipelines.get(&(at, entry)) {
            return Ok(pipeline.clone());
        }
        if !self.libraries.contains_key(&at) {
            let built = self.build(program)?;
            self.libraries.insert(at, built);
        }
        let Some(built) = self.libraries.get_mut(&at) else { return Err(Missing::Entry) };
        let function = built.library.newFunctionWithName(&NSString::from_str(entry)).ok_or(Missing::Entry)?;
        let (pipeline, is_fresh) = made(&self.device, built, &function)?;
        if is_fresh {
            self.settling.compiled();
        }
        self.pipelines.insert((at, entry), pipeline.clone());
        Ok(pipeline)
    }

    fn build(&self, program: &'static Program) -> Result<Built, Missing> {
        let source = self.text_of(program).ok_or(Missing::Entry)?;
        let options = MTLCompileOptions::new();
        options.setMathMode(MTLMathMode::Safe);
        options.setLanguageVersion(MTLLanguageVersion::Version3_1);
        let library = self.device.newLibraryWithSource_options_error(&NSString::from_str(&source), Some(&options));
        let library = library.map_err(failed)?;
        let system = self.kept.as_ref().map_or("", |kept| &kept.system);
        let key = Key::of(&Made { source: &source, settings: SETTINGS, target: &self.target, system });
        let archive = self.kept.as_ref().and_then(|kept| self.archive(kept, program.name, &key));
        Ok(Built { name: program.name, library, key, archive, is_fresh: false })
    }

    fn text_of(&self, program: &Program) -> Option<String> {
        let Some((edited, text)) = &self.edit else { return program.metal_text() };
        let in_place = |(name, included): &(&'static str, &'static str)| match included == edited {
            true => (*name, text.as_str()),
            false => (*name, *included),
        };
        let includes: Vec<_> = program.metal_includes.iter().map(in_place).collect();
        let source = program.metal?;
        Some(Program::expanded(if source == *edited { text } else { source }, &includes))
    }

    /// The archive on disk, or an empty one. One that Metal refuses is deleted.
    fn archive(&self, kept: &Kept, program: &str, key: &Key) -> Option<Archive> {
        let open = |path: Option<&Path>| {
            let descriptor = MTLBinaryArchiveDescriptor::new();
            descriptor.setUrl(path.and_then(url).as_deref());
            self.device.newBinaryArchiveWithDescriptor_error(&descriptor).ok()
        };
        let path = kept.shelf.find(program, key);
        if let Some(path) = &path {
            if let Some(archive) = open(Some(path)) {
                return Some(archive);
            }
            kept.shelf.drop_file(path);
        }
        open(None)
    }

    /// A round has ended: writes what was compiled, once nothing new comes. What could not be written, and why.
    pub fn round_ended(&mut self) -> Vec<String> {
        if self.settling.round_ended() { self.write() } else { Vec::new() }
    }

    /// Writes what is not on disk.
    pub fn write(&mut self) -> Vec<String> {
        let Some(kept) = &self.kept else { return Vec::new() };
        let mut problems = Vec::new();
        for built in self.libraries.values_mut() {
            let (true, Some(archive)) = (std::mem::take(&mut built.is_fresh), &built.archive) else { continue };
            let written = kept.shelf.keep(built.name, &built.key, |path| {
                let url = url(path).ok_or("its path is no text")?;
                archive.serializeToURL_error(&url).map_err(|error| error.to_string())
            });
            problems.extend(written.err().map(|error| error.to_string()));
        }
        problems
    }
}

fn url(path: &Path) -> Option<Retained<NSURL>> {
    Some(NSURL::fileURLWithPath(&NSString::from_str(path.to_str()?)))
}

/// A pipeline out of the program's archive, else compiled and added to it; whether it was compiled.
fn made(
    device: &ProtocolObject<dyn MTLDevice>,
    built: &mut Built,
    function: &ProtocolObject<dyn MTLFunction>,
) -> Result<(Pipeline, bool), Missing> {
    let descriptor = MTLComputePipelineDescriptor::init(MTLComputePipelineDescriptor::alloc());
    descriptor.setComputeFunction(Some(function));
    let make =
        |options| device.newComputePipelineStateWithDescriptor_options_reflection_error(&descriptor, options, None);
    let Some(archive) = &built.archive else {
        return make(MTLPipelineOption::None).map(|pipeline| (pipeline, false)).map_err(refused);
    };
    descriptor.setBinaryArchives(Some(&NSArray::from_slice(&[&**archive])));
    if let Ok(pipeline) = make(MTLPipelineOption::FailOnBinaryArchiveMiss) {
        return Ok((pipeline, false));
    }
    descriptor.setBinaryArchives(None);
    let pipeline = make(MTLPipelineOption::None).map_err(refused)?;
    // An archive that takes no more keeps what it has.
    let is_added = archive.addComputePipelineFunctionsWithDescriptor_error(&descriptor).is_ok();
    built.is_fresh |= is_added;
    Ok((pipeline, is_added))
}
