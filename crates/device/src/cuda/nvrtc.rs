//! NVIDIA's run-time compiler, where the machine has one: for developers, whose build embeds no cubins, and for the planted
//! faults of the kernel contract.

use cudarc::nvrtc::sys;
use std::ffi::{CStr, CString, c_char};
use std::sync::Mutex;

/// The library is loaded on the first call. Afterwards any threads may compile, each its own program.
static LOADING: Mutex<()> = Mutex::new(());

/// Whether the machine has the library.
pub fn is_present() -> bool {
    let _one = LOADING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // SAFETY: loading NVIDIA's library runs its initialisers, which touch nothing of ours.
    unsafe { sys::is_culib_present() }
}

/// The cubin of `texts` for a target such as `90a`: the source first, then what it includes, each with its name.
///
/// # Errors
/// That there is no compiler, or what it said.
pub fn compile(texts: &[(&str, String)], target: &str) -> Result<Vec<u8>, String> {
    if !is_present() {
        return Err(
            "this build embeds no code for it and the machine has no NVRTC (libnvrtc.so); `cargo xtask cubins` \
                    makes the code, then build again"
                .to_owned(),
        );
    }
    let c_string = |text: &str| CString::new(text).map_err(|_| "a source holds a NUL byte".to_owned());
    let named = |(name, text): &(&str, String)| Ok::<_, String>((c_string(name)?, c_string(text)?));
    let texts: Vec<(CString, CString)> = texts.iter().map(named).collect::<Result<_, _>>()?;
    let Some(((name, source), headers)) = texts.split_first() else { return Err("there is no source".to_owned()) };
    let header_names: Vec<*const c_char> = headers.iter().map(|(name, _)| name.as_ptr()).collect();
    let header_texts: Vec<*const c_char> = headers.iter().map(|(_, text)| text.as_ptr()).collect();
    let architecture = format!("--gpu-architecture=sm_{target}");
    let options = [architecture.as_str(), "--std=c++17", "--fmad=false", "--device-as-default-execution-space"];
    let options: Vec<CString> = options.into_iter().map(c_string).collect::<Result<_, _>>()?;
    let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: every string and array lives across the call.
    let created = unsafe {
        sys::nvrtcCreateProgram(
            &mut program,
            source.as_ptr(),
            name.as_ptr(),
            headers.len() as i32,
            header_texts.as_ptr(),
            header_names.as_ptr(),
        )
    };
    check("nvrtcCreateProgram", created)?;
    // SAFETY: the program exists and the options live across the call.
    let compiled = unsafe { sys::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr()) };
    let result = if compiled == sys::nvrtcResult::NVRTC_SUCCESS { cubin(program) } else { Err(log(program)) };
    // SAFETY: made above, destroyed once.
    unsafe { sys::nvrtcDestroyProgram(&mut program) };
    result
}

fn cubin(program: sys::nvrtcProgram) -> Result<Vec<u8>, String> {
    let mut length = 0;
    // SAFETY: writes one size.
    check("nvrtcGetCUBINSize", unsafe { sys::nvrtcGetCUBINSize(program, &mut length) })?;
    let mut cubin = vec![0_u8; length];
    // SAFETY: the buffer has the length that was asked for.
    check("nvrtcGetCUBIN", unsafe { sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast()) })?;
    Ok(cubin)
}

fn log(program: sys::nvrtcProgram) -> String {
    let mut length = 0;
    // SAFETY: writes one size.
    if unsafe { sys::nvrtcGetProgramLogSize(program, &mut length) } != sys::nvrtcResult::NVRTC_SUCCESS {
        return "it does not compile".to_owned();
    }
    let mut text = vec![0_u8; length.max(1)];
    // SAFETY: the buffer has the length that was asked for.
    unsafe { sys::nvrtcGetProgramLog(program, text.as_mut_ptr().cast()) };
    CStr::from_bytes_until_nul(&text).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn check(call: &str, result: sys::nvrtcResult) -> Result<(), String> {
    if result == sys::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(format!("{call} answered {result:?}")) }
}
