//! What the Metal backend decides without a device: chips, room in heaps, which host bytes stay where they are, the folder of
//! compiled pipelines, argument tables, keep-alive ticks. Pure, or plain files, so that all of it is tested where there is
//! no Mac; `metal` asks it and calls Apple's interfaces.

pub mod archive;
pub mod chip;
pub mod entry;
pub mod heaps;
pub mod mapping;
pub mod table;
pub mod ticks;
