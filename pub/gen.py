"""Scratch: writes bench/papers/published/*.toml"""
import csv, json, sys, re, hashlib
from pathlib import Path
root=Path('/tmp/w/planner/bench/papers/published'); root.mkdir(exist_ok=True)
def fnv(s):
    h=0xcbf29ce484222325
    for b in s.encode(): h=((h^b)*0x100000001b3)&0xffffffffffffffff
    return h
def half(f):  # high bits: FNV's lowest bit is a parity of the bytes
    return 'held-out' if (fnv(f)>>32)&1 else 'tuning'
files={}
def group(file, **g):
    files.setdefault(file,[]).append(g)
SRC={}
def source(file, source, url, date, note=''):
    SRC[file]=dict(source=source,url=url,date=date,note=note)
TP=lambda n,pp=1:[pp,n,1,n,1]
TEP=lambda n,pp=1:[pp,n,1,1,n]
DEP=lambda n,pp=1:[pp,1,n,1,n]
DTP=lambda n:[1,1,n,n,1]
# --- MixServe
source('mixserve','MixServe, sections IV-B and IV-C, Figures 10 and 11, Table II; numbers that the text has','arXiv: MixServe (Zhou, Jia, He, Zhang, Dong)','',
 'Lengths are ShareGPT\'s means; at most 16 requests run at once. Rows with 1.068 and 1.245 are the ends of a range that the text gives for expert parallelism: MixServe is that many times faster.')
for gpu,model,w,pp,mix,prec in (('h20','deepseek-r1','fp8',362.78,545.23,1),('h20','qwen3-235b','bf16',435.82,625.45,1),('910b','deepseek-r1','bf16',100.61,122.72,1),('910b','qwen3-235b','bf16',113.52,150.08,1)):
    n=2 if gpu=='h20' else 4
    cl=f'{gpu}-{n}x8'
    rows=[dict(layout=TP(8,n),value=pp), dict(layout=[1,8,n,8,n],value=mix)]
    group('mixserve',id=f'mixserve-{gpu}-{model}-throughput',model=model,cluster=cl,weights=[w,w],cache='bf16',input=220,output=200,metric='total_tokens_per_second',load=16,rows=rows)
    best=[dict(layout=[1,8,n,8,n],value=1.068),dict(layout=[1,8,n,1,8*n],value=1.0),dict(layout=[1,4,2*n,1,8*n],value=1.0)]
    group('mixserve',id=f'mixserve-{gpu}-{model}-hybrid-over-ep',model=model,cluster=cl,weights=[w,w],cache='bf16',input=220,output=200,metric='total_tokens_per_second',load=16,rows=best)
    low=mix/1.245
    if low>pp*1.03:
        group('mixserve',id=f'mixserve-{gpu}-{model}-ep-over-stages',model=model,cluster=cl,weights=[w,w],cache='bf16',input=220,output=200,metric='total_tokens_per_second',load=16,
          rows=[dict(layout=TP(8,n),value=pp),dict(layout=[1,8,n,1,8*n],value=round(low,2)),dict(layout=[1,4,2*n,1,8*n],value=round(low,2))])
for model,pp,mix in (('deepseek-r1',227.33,160.06),('qwen3-235b',134.27,81.1)):
    group('mixserve',id=f'mixserve-910b-{model}-itl',model=model,cluster='910b-4x8',weights=['bf16','bf16'],cache='bf16',input=220,output=200,metric='tpot_ms',load=16,rows=[dict(layout=TP(8,4),value=pp),dict(layout=[1,8,4,8,4],value=mix)])
group('mixserve',id='mixserve-910b-deepseek-r1-ttft',model='deepseek-r1',cluster='910b-4x8',weights=['bf16','bf16'],cache='bf16',input=220,output=200,metric='ttft_ms',load=16,rows=[dict(layout=[1,8,4,8,4],value=1.0),dict(layout=TP(8,4),value=2.67),dict(layout=[1,8,4,1,32],value=1.70)])
group('mixserve',id='mixserve-910b-qwen3-235b-ttft',model='qwen3-235b',cluster='910b-4x8',weights=['bf16','bf16'],cache='bf16',input=220,output=200,metric='ttft_ms',load=16,rows=[dict(layout=[1,8,4,8,4],value=383.14),dict(layout=TP(8,4),value=round(383.14*3.8,1))])
for model in ('deepseek-r1','qwen3-235b'):
    group('mixserve',id=f'mixserve-910b-{model}-balanced',model=model,cluster='910b-4x8',weights=['bf16','bf16'],cache='bf16',input=220,output=200,metric='total_tokens_per_second',load=16,rows=[dict(layout=[1,8,4,8,4],value=1.05),dict(layout=[1,4,8,8,4],value=1.0),dict(layout=[1,8,4,4,8],value=1.0)])
# --- Azure
source('azure','LLM Inference Across NVLink and InfiniBand, J. Zhang','https://jingchaozhang.github.io/LLM-Inference-Across-NVLink-and-InfiniBand','2026-01-08','Qwen2.5-72B, one request at a time.')
for m,v in (('user_tokens_per_second',(60.8,99.5,67.5,34.3)),('ttft_ms',(25,19,25.8,58.5))):
    group('azure',id='azure-'+m.split('_')[0],model='qwen2.5-72b',cluster='h100-2x8',weights=['bf16','bf16'],cache='bf16',input=57,output=512,metric=m,load=1,rows=[dict(layout=l,value=x) for l,x in zip((TP(4),TP(8),TP(8,2),TP(16)),v)])
# --- NVIDIA 405B
source('nvidia-405b','Boosting Llama 3.1 405B Throughput by Another 1.5x on NVIDIA H200 Tensor Core GPUs and NVLink Switch','https://developer.nvidia.com/blog/boosting-llama-3-1-405b-throughput-by-another-1-5x-on-nvidia-h200-tensor-core-gpus-and-nvlink-switch/','2024-10-09','Ratios, as the post prints them.')
group('nvidia-405b',id='nvidia-405b-throughput',model='llama-3.1-405b',cluster='h200-1x8',weights=['fp8','fp8'],cache='fp8',input=2048,output=128,metric='output_tokens_per_second',load='max',rows=[dict(layout=TP(8),value=1.0),dict(layout=TP(1,8),value=1.5)])
group('nvidia-405b',id='nvidia-405b-latency',model='llama-3.1-405b',cluster='h200-1x8',weights=['fp8','fp8'],cache='fp8',input=2048,output=128,metric='user_tokens_per_second',load=1,rows=[dict(layout=TP(8),value=5.6),dict(layout=TP(1,8),value=1.0)])
# --- TensorRT-LLM 0.17
source('trtllm-0.17','TensorRT-LLM 0.17, performance overview','https://github.com/NVIDIA/TensorRT-LLM/blob/258c7540c03517def55d9a5aadfa9288af474e1b/docs/source/performance/perf-overview.md','2025-01','All requests are queued at once. Of nine pairs of lengths the four that differ most.')
L=((128,2048),(1000,1000),(2048,128),(20000,2000))
T={('mixtral-8x7b','h200'):{1:(15095.21,10371.36,2009.67,1151.78),2:(29584.05,19151.19,3383.16,2299.21),4:(52291.78,33580.9,5467.62,4236.84),8:(68608.45,44705.48,7554.38,6835.53)},
('mixtral-8x7b','h100'):{1:(8290.13,6868.52,1892.81,673.7),2:(22830.08,15770.89,3333.68,1757.45),4:(41164.73,27784.74,5234.98,3303.83),8:(61607.7,40631.71,6988.18,5602.43)},
('mixtral-8x7b','a100'):{2:(4169.78,3154.52,649,337.51),4:(10911.86,7122.84,1237.62,829.59),8:(20277.88,12851.44,2165.52,1592.53)},
('llama-3.1-70b','h200'):{1:(4165.68,2823.45,465.99,279.52),2:(8290.35,5164.76,809,640.62),4:(14156,8911.29,1358.06,1199.68),8:(21195.88,13181.24,1983.03,1920.45)},
('llama-3.1-70b','h100'):{1:(911.62,839.97,343.29,None),2:(6169.58,4390.53,772.66,443.01),4:(11511.93,7430.99,1302.6,920.19),8:(17061.82,11451.16,1923.41,1512.6)},
('llama-3.1-70b','a100'):{2:(531.26,472.94,148.96,None),4:(2811.27,1921.77,325.15,212.08),8:(5241.5,3320.41,542.38,413.38)}}
for (m,gpu),t in T.items():
    w='bf16' if gpu=='a100' else 'fp8'
    for k,(i,o) in enumerate(L):
        group('trtllm-0.17',id=f'trtllm-0.17-{m}-{gpu}-{i}-{o}',model=m,cluster=f'{gpu}-1x8',weights=[w,w],cache=w,input=i,output=o,metric='output_tokens_per_second',load='max',rows=[dict(layout=TP(n),value=v[k]) for n,v in t.items() if v[k]])
# --- TensorRT-LLM 1.0 and 1.2 on RTX Pro 6000
source('trtllm-rtx','TensorRT-LLM 1.0 and 1.2, performance overview, RTX 6000 Pro Blackwell Server Edition','https://github.com/NVIDIA/TensorRT-LLM/blob/00f37686aa854010d68bcbd0f4ab000221541ca6/docs/source/performance/perf-overview.md and 03e27c7d5ff0c6e89f8328838c0a8e64f1b34f9d/docs/source/developer-guide/perf-overview.md','2025-09 and 2025-12','All requests are queued at once. 1.2 prints tokens/s and GPU: here times the GPUs.')
T={'llama-3.1-70b':{TP(1,n)[0]:v for n,v in ((1,(2422,1787,393,142)),(2,(4993,3707,813,319)),(4,(7922,5961,1511,630)),(8,(9833,8166,2495,1148)))}}
for k,(i,o) in enumerate(L):
    group('trtllm-rtx',id=f'trtllm-1.0-llama-3.3-70b-rtx-{i}-{o}',model='llama-3.1-70b',cluster='rtx-1x8',weights=['nvfp4','nvfp4'],cache='fp8',input=i,output=o,metric='output_tokens_per_second',load='max',rows=[dict(layout=TP(1,n),value=v[k]) for n,v in T['llama-3.1-70b'].items()])
Q={1:(12540,9910,3257,871),2:(22744,16431,3785,1558),4:(35715,24046,4311,2551),8:(52676,31785,4798,None)}
for k,(i,o) in enumerate(L):
    group('trtllm-rtx',id=f'trtllm-1.0-qwen3-30b-rtx-{i}-{o}',model='qwen3-30b',cluster='rtx-1x8',weights=['nvfp4','nvfp4'],cache='fp8',input=i,output=o,metric='output_tokens_per_second',load='max',rows=[dict(layout=TP(n),value=v[k]) for n,v in Q.items() if v[k]])
def rtx(m,i,o,rows):
    group('trtllm-rtx',id=f'trtllm-1.2-{m}-rtx-{i}-{o}',model=m,cluster='rtx-1x8',weights=['nvfp4','nvfp4'],cache='fp8',input=i,output=o,metric='output_tokens_per_second',load='max',rows=[dict(layout=l,value=v) for l,v in rows])
for i,o,a,b in ((1000,1000,1724,1901),(8192,1024,296,327)): rtx('llama-3.1-70b',i,o,[(TP(1),a),(TP(1,2),2*b)])
for i,o,a,b in ((1000,1000,1731,969),(1024,8192,644,711)): rtx('qwen3-235b',i,o,[(DEP(2,2),4*a),(DEP(8),8*b)])
rtx('qwen3-30b',1000,1000,[(DEP(2),2*8409),(DEP(2,2),4*7059),(DEP(8),8*3985),(TP(1),9938)])
rtx('qwen3-30b',1024,8192,[(DEP(2),2*3577),(DEP(8),8*2406),(TP(1),3621)])
rtx('qwen3-30b',8192,1024,[(DEP(2,2),4*1416),(TP(1),1914)])
rtx('qwen3-30b',32768,1024,[(DEP(8),8*180),(TP(1),374)])
# --- TensorRT-LLM blog 3
source('trtllm-blog3','Optimizing DeepSeek R1 Throughput on NVIDIA Blackwell GPUs (TensorRT-LLM tech blog 3)','https://github.com/NVIDIA/TensorRT-LLM/blob/2cd3b522a87bd627f1a7bc381adf3bcce75c11e1/docs/source/blogs/tech_blog/blog03_Optimizing_DeepSeek_R1_Throughput_on_NVIDIA_Blackwell_GPUs.md','2025-06','Ratios, as the post prints them: attention DP over TP, experts whole over sliced.')
for k,l,v in (('attention',TEP(8),4.0),('experts',DTP(8),1.42)):
    group('trtllm-blog3',id=f'trtllm-blog3-{k}',model='deepseek-r1',cluster='b200-1x8',weights=['nvfp4','bf16'],cache='fp8',input=1024,output=2048,metric='output_tokens_per_second',load='max',rows=[dict(layout=l,value=1.0),dict(layout=DEP(8),value=v)])
# --- gpustack
source('gpustack','GPUStack performance lab','https://github.com/gpustack/gpustack/tree/47277d79f4a5bae12a2d25e9ecbed2a2177a5f2d/docs/performance-lab','2025-10 to 2026-01','All requests are sent at once; vLLM runs at most 1024 sequences on H100, 256 on A100.')
def gp(id,model,gpu,w,i,o,load,rows):
    group('gpustack',id='gpustack-'+id,model=model,cluster=f'{gpu}-1x8',weights=w,cache='bf16',input=i,output=o,metric='total_tokens_per_second',load=load,rows=[dict(layout=l,value=v) for l,v in rows])
G=['mxfp4','bf16']
gp('gpt-oss-120b-h100-sharegpt','gpt-oss-120b','h100',G,215,196,1000,[(TP(1),6325.41),(TP(2),16042.19),(TP(4),23759.49),(TP(1,2),11198.56)])
for i,o,load,a,b in ((128,4,1000,17059.15,31517.47),(2000,98,500,14385.69,34083.02),(4000,134,500,14247.47,34491.13),(32000,98,100,16136.57,32471.01)):
    gp(f'gpt-oss-120b-h100-{i}','gpt-oss-120b','h100',G,i,o,load,[(TP(1),a),(TP(2),b)])
gp('gpt-oss-120b-a100-sharegpt','gpt-oss-120b','a100',G,215,196,256,[(TP(1),4986.20),(TP(2),7897.72)])
gp('qwen3-235b-h100-sharegpt','qwen3-235b','h100',['fp8','fp8'],217,196,1000,[(TEP(8),8102.36),(TP(4),7527.80),(TEP(4),7131.69)])
gp('qwen3-235b-a100-sharegpt','qwen3-235b','a100',['fp8','fp8'],217,196,256,[(TEP(8),3740.89),(TP(4),3019.19),(TEP(4),2814.47)])
# --- SGLang
source('sglang-large-ep','Deploying DeepSeek with PD Disaggregation and Large-scale Expert Parallelism on 96 H100 GPUs, the SGLang team','https://lmsys.org/blog/2025-05-05-large-scale-ep/','2025-05-05','Tokens/s of a node, times the nodes. The baseline from the ratios that the post prints (3.3 and 5.2); its batch is a fourth (the post: batches 4 times as large). Two-batch overlap is on.')
group('sglang-large-ep',id='sglang-large-ep-prefill',model='deepseek-r1',cluster='h100-12x8',weights=['fp8','fp8'],cache='bf16',input=2048,output=1,metric='prefill_tokens_per_second',load='chunk',rows=[dict(layout=DEP(32),value=54543*4),dict(layout=DTP(16),value=round(54543*2/3.3))])
group('sglang-large-ep',id='sglang-large-ep-decode',model='deepseek-r1',cluster='h100-12x8',weights=['fp8','fp8'],cache='bf16',input=2000,output=1,metric='decode_tokens_per_second',load=1,rows=[dict(layout=DEP(72),value=22282*9,load=18432),dict(layout=DTP(16),value=round(22282*2/5.2),load=1024)])
source('sglang-0.4','SGLang v0.4, data parallelism attention','https://lmsys.org/blog/2024-12-04-sglang-v0-4/','2024-12-04','The ratio that the post prints.')
group('sglang-0.4',id='sglang-0.4-attention',model='deepseek-v2',cluster='h100-1x8',weights=['fp8','fp8'],cache='bf16',input=1,output=512,metric='output_tokens_per_second',load='max',rows=[dict(layout=TP(8),value=1.0),dict(layout=DTP(8),value=1.9)])
source('sglang-issues','SGLang pull request 3602 and issue 3956','https://github.com/sgl-project/sglang/pull/3602 and /issues/3956','2025-02-16 and 2025-03-03','')
group('sglang-issues',id='sglang-3602',model='deepseek-r1',cluster='h200-1x8',weights=['fp8','fp8'],cache='bf16',input=93,output=201,metric='output_tokens_per_second',load=500,rows=[dict(layout=TEP(8),value=1468.48),dict(layout=TP(8),value=1403.02)])
group('sglang-issues',id='sglang-3956',model='deepseek-r1',cluster='h20-2x8',weights=['fp8','fp8'],cache='bf16',input=760,output=460,metric='total_tokens_per_second',load=768,rows=[dict(layout=TP(16),value=3909.04),dict(layout=DTP(16),value=5457.14)])
# --- AMD
source('amd-moe-playbook','The vLLM MoE Playbook, AMD','https://rocm.blogs.amd.com/software-tools-optimization/vllm-moe-guide/README.html','2025-11-24','7,114 tokens/s is printed, other rows are ratios: 1.47 and 1.52; for Qwen3 the least of the printed ranges (40 to 86%, 16 to 47%).')
for load,a,b in ((64,1.52,1.0),(1024,round(7114/1.47,1),7114)):
    group('amd-moe-playbook',id=f'amd-deepseek-r1-{load}',model='deepseek-r1',cluster='mi300x-1x8',weights=['fp8','fp8'],cache='bf16',input=8192,output=1024,metric='output_tokens_per_second',load=load,rows=[dict(layout=TEP(8),value=a),dict(layout=DEP(8),value=b)])
group('amd-moe-playbook',id='amd-deepseek-r1-64-ttft',model='deepseek-r1',cluster='mi300x-1x8',weights=['fp8','fp8'],cache='bf16',input=8192,output=1024,metric='ttft_ms',load=64,rows=[dict(layout=TEP(8),value=0.2),dict(layout=DEP(8),value=1.0)])
for load,a,b in ((64,1.4,1.0),(128,1.4,1.0),(512,1.0,1.16),(1024,1.0,1.16)):
    group('amd-moe-playbook',id=f'amd-qwen3-235b-{load}',model='qwen3-235b',cluster='mi300x-1x8',weights=['bf16','bf16'],cache='bf16',input=8192,output=1024,metric='output_tokens_per_second',load=load,rows=[dict(layout=TEP(8),value=a),dict(layout=DEP(8),value=b)])
# --- InferenceX, vLLM issues
source('issues','InferenceX pull request 832; vLLM issues 28887 and 22331','https://github.com/SemiAnalysisAI/InferenceX/pull/832, https://github.com/vllm-project/vllm/issues/28887 and /22331','2026-03-02, 2025-11-17, 2025-08-28','')
for m,a,b in (('total_tokens_per_second',107.4*8,145.1*4),('tpot_ms',8.96,13.34),('ttft_ms',83.9,129.8)):
    group('issues',id='inferencex-832-'+m.split('_')[0],model='minimax-m2',cluster='h100-1x8',weights=['fp8','fp8'],cache='bf16',input=1024,output=1024,metric=m,load=4,rows=[dict(layout=TEP(8),value=round(a,1) if a>90 else a),dict(layout=TEP(4),value=round(b,1) if b>90 else b)])
for load,a,b in ((8,545.59,562.96),(16,683.84,744.31)):
    group('issues',id=f'vllm-28887-{load}',model='deepseek-r1',cluster='h200-1x8',weights=['fp8','fp8'],cache='bf16',input=1600,output=600,metric='ttft_ms',load=load,rows=[dict(layout=TP(8),value=a),dict(layout=TEP(8),value=b)])
group('issues',id='vllm-22331',model='gpt-oss-120b',cluster='a100-1x8',weights=G,cache='bf16',input=128,output=512,metric='user_tokens_per_second',load=1,rows=[dict(layout=TP(1),value=90),dict(layout=TP(2),value=77.5),dict(layout=TP(4),value=77.5)])
# --- two 3090
source('reddit','Qwen3 throughput benchmarks on 2x 3090, r/LocalLLaMA','https://www.reddit.com/r/LocalLLaMA/comments/1kkvqti/','2025-05-12','Qwen3-32B W4A16: one copy on each GPU (77 tokens/s together) against TP2.')
group('reddit',id='reddit-qwen3-32b-3090',model='qwen3-32b',cluster='3090-1x2',weights=['int4','int4'],cache='bf16',input=4096,output=1024,metric='output_tokens_per_second',load='max',rows=[dict(layout=TP(1),value=38.5),dict(layout=TP(2),value=125)])
# --- papers
source('papers','ParaSMoE, Figure 1; Moebius, section 2','papers','','Orders that the texts state, values 1 and 1.1; ParaSMoE\'s numbers of requests are not printed: 16 and 4096 stand for its small and large batches.')
for load,a,b in ((16,1.1,1.0),(4096,1.0,1.1)):
    group('papers',id=f'parasmoe-figure-1-{load}',model='deepseek-v2',cluster='h200-2x8',weights=['bf16','bf16'],cache='bf16',input=1024,output=1024,metric='output_tokens_per_second',load=1,rows=[dict(layout=TP(8),value=round(a/2,3),load=load//2),dict(layout=DEP(16),value=b,load=load)])
for load,a,b in ((64,1.1,1.0),(512,1.0,1.1)):
    group('papers',id=f'moebius-{load}',model='qwen3-235b',cluster='h200-1x8',weights=['bf16','bf16'],cache='bf16',input=1024,output=1024,metric='output_tokens_per_second',load=load,rows=[dict(layout=TP(8),value=a),dict(layout=DEP(8),value=b)])
# --- aiconfigurator
sys.path.insert(0,'/tmp/w/planner/bench/papers/python')
import rows as R
source('aiconfigurator','silicon_sample.csv of aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0)','https://pypi.org/project/aiconfigurator-core/0.12.0/','2026','Rows of one model, system, engine, version, lengths and requests in flight on as many GPUs in different layouts, degrees repaired as python/rows.py does; medians of repeated rows; models that the planner reads..')
from collections import defaultdict
import statistics
MODEL={'MiniMax-M2.5':'minimax-m2','Qwen3-235B-A22B-FP8':'qwen3-235b','DeepSeek-R1':'deepseek-r1','DeepSeek-V3':'deepseek-r1','Kimi-K2.5':'kimi-k2','gpt-oss-120b':'gpt-oss-120b','Qwen3-32B':'qwen3-32b','Llama-3.1-70B':'llama-3.1-70b','DeepSeek-R1-NVFP4':'deepseek-r1'}
SYS={'h100_sxm':'h100-1x8','h200_sxm':'h200-1x8','b200_sxm':'b200-1x8','b300_sxm':'b300-1x8'}
G2=defaultdict(lambda: defaultdict(list))
raw=list(csv.DictReader(open('/tmp/w/aic/aiconfigurator_core/systems/silicon_sample.csv')))
for line in raw:
    r=R.row_of(line)
    name=r.model.split('/')[1]
    if r.split or name not in MODEL or r.system not in SYS: continue
    pp,tp,dp,etp,ep=r.decode
    gpus=pp*tp*dp
    if tp*dp!=etp*ep or gpus>8: continue
    key=(name,r.system,r.backend,line['backend_version'],r.weights,r.cache,r.input,r.output,r.concurrency,gpus)
    G2[key][r.decode].append(r.tpot*1e3)
n=0;tot=0
for key in sorted(G2,key=str):
    d=G2[key]
    if len(d)<2: continue
    tot+=1
    name,system,backend,ver,w,cache,i,o,c,gpus=key
    id=f'aic-{name}-{system}-{backend}-{ver}-{w[0]}-{i}-{o}-{int(c)}-{gpus}'.lower()
    pass
    n+=1
    group('aiconfigurator',id=id,model=MODEL[name],cluster=SYS[system],weights=list(w),cache=cache,input=i,output=o,metric='tpot_ms',load=int(c),rows=[dict(layout=list(l),value=round(statistics.median(v),3)) for l,v in sorted(d.items())])
print('aic groups',tot,'taken',n)
# ---- write
def fam(file,g):
    if file=='aiconfigurator':
        return f"aiconfigurator {g['model']} {g['cluster'].split('-')[0]} {g['id'].split('_sxm-')[1].split('-')[0]}"
    return f"{file} {g['model']} {g['cluster'].split('-')[0]}"
fams={}
pairs={'tuning':0,'held-out':0}
def gp_(l): return l[0]*l[1]*l[2]
for file,gs in files.items():
    s=SRC[file]
    out=[f'# {s["note"]}'] if s['note'] else []
    out+=[f'source = {json.dumps(s["source"])}',f'url = {json.dumps(s["url"])}',f'date = {json.dumps(s["date"])}','']
    for g in gs:
        f=fam(file,g); h=half(f); fams.setdefault(f,[h,0,0])
        vals=[(r['value'],gp_(r['layout'])) for r in g['rows']]
        norm=[v/n if 'tokens_per_second' in g['metric'] and 'user' not in g['metric'] else v for v,n in vals]
        k=sum(1 for a in range(len(norm)) for b in range(a) if max(norm[a],norm[b])/min(norm[a],norm[b])>1.03)
        fams[f][1]+=1; fams[f][2]+=k; pairs[h]+=k
        out+=['[[groups]]',f'id = {json.dumps(g["id"])}',f'family = {json.dumps(f)}',f'half = {json.dumps(h)}',f'model = {json.dumps(g["model"])}',f'cluster = {json.dumps(g["cluster"])}',f'weights = {json.dumps(g["weights"])}',f'cache = {json.dumps(g["cache"])}',f'input = {g["input"]}',f'output = {g["output"]}',f'metric = {json.dumps(g["metric"])}','rows = [']
        for r in g['rows']:
            load=r.get('load',g['load'])
            out.append(f'    {{ layout = {r["layout"]}, load = {json.dumps(load)}, value = {r["value"]} }},')
        out+=[']','']
    (root/f'{file}.toml').write_text('\n'.join(out))
for f,(h,a,b) in sorted(fams.items()): print(f'{h:9s} {a:3d} {b:4d} {f}')
print(pairs,len(fams))
