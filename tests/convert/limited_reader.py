"""The process that reads files of torch, with lower limits, which hostile files reach sooner."""

from zeroir.convert import torch_process

if __name__ == "__main__":
    vars(torch_process).update(MEMORY_BYTES=100 << 20, PROCESSOR_S=1)
    torch_process.main()
